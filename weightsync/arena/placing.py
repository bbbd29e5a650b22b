"""Where tensors lie in an arena that a client maps: offsets and strides, in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weightsync.arena.homes import Homes
from weightsync.core.dtypes import DType
from weightsync.core.errors import InvalidRequestError
from weightsync.core.types import Segment, SharedTensorPolicy, TensorKey
from weightsync.core.views import PlacedPart, TensorPlacement
from weightsync.layout.plan import ParameterSpec, Placement, TensorPlan
from weightsync.layout.shares import ParameterKey


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Where storages lie in an arena.

    Attributes:
        size: Of the arena, in bytes.
        offsets: First byte of each storage.
    """

    size: int
    offsets: Mapping[ParameterKey, int]


def placements(
    homes: Homes, arena: ArenaPlan, policy: SharedTensorPolicy
) -> Iterator[TensorPlacement]:
    """Yield where the tensors lie that a client may place."""
    for target, layout in homes.layouts.items():
        for plan in layout.tensors.values():
            refused = policy is SharedTensorPolicy.REFUSE
            if not _can_be_placed(plan) or (
                refused and homes.is_foreign(TensorKey(target, plan.name))
            ):
                continue
            keys = (ParameterKey(target, placement.parameter) for placement in plan.placements)
            parts = (
                _part(placement, homes.spec(key), arena.offsets[homes.of(key)])
                for placement, key in zip(plan.placements, keys, strict=True)
            )
            yield TensorPlacement(target, plan.name, plan.dtype, plan.shape, tuple(parts))


def check_placed(segment: Segment, plan: TensorPlan, arena: ArenaPlan | None) -> None:
    """Refuse a segment that can't be in an arena already.

    Raises:
        InvalidRequestError: nobody maps the session's arena, or its bytes need a cast or a check.
    """
    if arena is None:
        raise InvalidRequestError(
            f"tensor {segment.name!r} is said to be placed, but this session has no arena that a"
            " client maps: see its transport; send the bytes",
            subjects=["segments.placed"],
        )
    if segment.dtype is not plan.dtype or not _can_be_placed(plan):
        raise InvalidRequestError(
            f"tensor {segment.name!r} is {plan.dtype} on the worker and {segment.dtype} here; only"
            " bytes that need neither a cast nor a check can be placed: send them",
            subjects=["segments.placed"],
        )


def _can_be_placed(plan: TensorPlan) -> bool:
    # The bytes of a bool are looked at, and could change behind that look.
    return plan.dtype is not DType.BOOL


def _part(placement: Placement, spec: ParameterSpec, base: int) -> PlacedPart:
    strides = _byte_strides(spec)
    offset = base + sum(i * s for i, s in zip(placement.dest.offsets, strides, strict=True))
    along = {a: stride for a, stride in zip(placement.axes, strides, strict=True) if a is not None}
    dims = range(placement.source.ndim)
    return PlacedPart(placement.source, offset, tuple(along.get(d, 0) for d in dims))


def _byte_strides(spec: ParameterSpec) -> tuple[int, ...]:
    strides: list[int] = []
    step = spec.dtype.itemsize
    for size in reversed(spec.shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)
