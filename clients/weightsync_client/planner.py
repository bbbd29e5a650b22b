"""Which boxes of a tensor go to which workers: pure arithmetic over what the workers list."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weightsync.core.coverage import Coverage
from weightsync.core.dtypes import DType, check_cast
from weightsync.core.errors import OutOfBoundsError, ShapeMismatchError, UnknownTensorError
from weightsync.core.regions import Region
from weightsync.core.types import (
    CastPolicy,
    Scope,
    Segment,
    SharedTensorPolicy,
    Target,
    TensorKey,
    UpdateRequest,
)
from weightsync.core.views import MissingTensor, TensorInfo

Rows = Literal["equal", "prefix"]
"""`equal`: shapes must be equal. `prefix`: the first dimension may differ; the rows that both
sides have are sent, the sender's further rows are cut off, the worker's stay as they are."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Boxes of one tensor for workers that need the same ones.

    Attributes:
        workers: Indices of the workers.
        key: The tensor as these workers are to be told of it: the owner of its share group.
        shape: Its global shape on the workers.
        boxes: Disjoint boxes, none of them empty.
        tied: Other names of the session are the same storage: equal bytes need to go once only.
    """

    workers: tuple[int, ...]
    key: TensorKey
    shape: tuple[int, ...]
    boxes: tuple[Region, ...]
    tied: bool


class Needs:
    """What one worker needs of the targets of a session."""

    def __init__(self, tensors: Iterable[TensorInfo], request: UpdateRequest) -> None:
        """Take a worker's list and what is asked of it."""
        self.tensors = {
            TensorKey(t.target, t.name): t for t in tensors if t.target in request.targets
        }
        self._owners = _owners(self.tensors, request.shared_tensors)
        self._missing: dict[TensorKey, tuple[Region, ...]] | None = None

    def owner(self, key: TensorKey) -> TensorKey:
        """Return the name under which a tensor is sent: the first one of its storage."""
        return self._owners.get(key, key)

    def tied(self, key: TensorKey) -> bool:
        """Tell whether other names of the session are the same storage."""
        return key in self._owners

    def restrict(self, missing: Iterable[MissingTensor]) -> None:
        """Need only what a worker says it misses; composites, which it lists by parts, stay."""
        self._missing = self._by_owner(missing)

    def boxes(self, key: TensorKey, region: Region) -> tuple[Region, ...]:
        """Return the disjoint boxes of a region that the worker needs."""
        info = self.tensors[key]
        if self._missing is None and info.regions == (region,):
            # Nearly always; a model may have many thousand small tensors.
            return info.regions if region.numel else ()
        wanted = [common for box in info.regions if (common := box.intersect(region))]
        if self._missing is not None and not info.composite:
            missing = self._missing.get(self.owner(key), ())
            wanted = [common for a in wanted for b in missing if (common := a.intersect(b))]
        return tuple(_disjoint(wanted))

    def lacks(self, segments: Iterable[Segment], missing: Iterable[MissingTensor]) -> bool:
        """Tell whether a worker that misses `missing` needs bytes of the segments."""
        lacking = self._by_owner(missing)
        for segment in segments:
            if self.tensors[segment.key].composite:
                return True
            size = segment.dtype.itemsize
            runs = segment.region.runs(segment.byte_offset // size, segment.byte_length // size)
            regions = lacking.get(self.owner(segment.key), ())
            if any(run.intersect(region) for run in runs for region in regions):
                return True
        return False

    def _by_owner(self, missing: Iterable[MissingTensor]) -> dict[TensorKey, tuple[Region, ...]]:
        boxes: dict[TensorKey, tuple[Region, ...]] = {}
        for tensor in missing:
            known = self.tensors.get(TensorKey(tensor.target, tensor.name))
            if known is None or not all(region.fits(known.shape) for region in tensor.regions):
                raise OutOfBoundsError(
                    f"the worker misses what it does not need: {tensor.name!r}",
                    subjects=[tensor.name],
                )
            key = self.owner(TensorKey(tensor.target, tensor.name))
            boxes[key] = (*boxes.get(key, ()), *tensor.regions)
        return boxes


class Planner:
    """Plans shards for the workers of one session; workers with equal needs are served together."""

    def __init__(
        self, needs: Sequence[Needs], request: UpdateRequest, rows: Rows = "equal"
    ) -> None:
        """Take the needs of all workers, in their order."""
        self._needs = tuple(needs)
        self._cast = request.cast is CastPolicy.ALLOW
        self._full = request.scope is Scope.FULL
        self._rows = rows
        self._names: dict[Target, dict[str, None]] = {target: {} for target in Target}
        for worker in self._needs:
            for key in worker.tensors:
                self._names[key.target][key.name] = None

    def names(self, target: Target) -> Collection[str]:
        """Return the names of a target's tensors that at least one worker has."""
        return self._names[target]

    def plan(
        self, key: TensorKey, dtype: DType, shape: tuple[int, ...], region: Region
    ) -> list[Delivery]:
        """Return who needs what of a region of a tensor.

        Args:
            key: The tensor, by the workers' name.
            dtype: The sender's element type.
            shape: The sender's global shape.
            region: The part that the sender holds.

        Raises:
            UnknownTensorError: no worker has the tensor.
            ShapeMismatchError: the global shapes differ and no rule bridges it.
            DTypeMismatchError: the element types differ and the session does not cast.
        """
        groups: dict[tuple[TensorKey, tuple[int, ...], tuple[Region, ...], bool], list[int]] = {}
        known = False
        for index, needs in enumerate(self._needs):
            info = needs.tensors.get(key)
            if info is None:
                continue
            known = True
            check_cast(dtype, info.dtype, allowed=self._cast, name=key.name)
            common = self._bridge(info, shape, region)
            boxes = needs.boxes(key, common) if common is not None else ()
            if boxes:
                group = (needs.owner(key), info.shape, boxes, needs.tied(key))
                groups.setdefault(group, []).append(index)
        if not known:
            raise UnknownTensorError(f"no worker has the tensor {key}", subjects=[key.name])
        return [
            Delivery(tuple(workers), owner, to_shape, boxes, tied)
            for (owner, to_shape, boxes, tied), workers in groups.items()
        ]

    def _bridge(self, info: TensorInfo, shape: tuple[int, ...], region: Region) -> Region | None:
        if shape == info.shape:
            return region
        if self._rows == "prefix" and shape and info.shape and shape[1:] == info.shape[1:]:
            return region.intersect(Region.whole(info.shape))
        raise ShapeMismatchError(
            f"tensor {info.name!r} has the shape {list(info.shape)} on the worker but was pushed "
            f"with {list(shape)}; push the worker's shape, or start with rows='prefix' if only "
            f"padded rows differ",
            subjects=[info.name],
        )

    def total_bytes(self) -> int | None:
        """Return the bytes of all distinct deliveries of a FULL session; None for PARTIAL ones."""
        if not self._full:
            return None
        deliveries = {
            (needs.owner(key), boxes): sum(box.numel for box in boxes) * info.dtype.itemsize
            for needs in self._needs
            for key, info in needs.tensors.items()
            if not info.composite and (boxes := needs.boxes(key, Region.whole(info.shape)))
        }
        return sum(deliveries.values())


def _owners(
    tensors: Mapping[TensorKey, TensorInfo], policy: SharedTensorPolicy
) -> dict[TensorKey, TensorKey]:
    """Return the first name of each share group for all its names; groups of one are left out.

    Only names that agree in shape, type and regions stand for each other. A draft that is to get
    storages of its own is no part of the verifier's groups.
    """
    groups: dict[tuple[object, ...], list[TensorKey]] = {}
    for key, info in sorted(tensors.items(), key=lambda item: item[0].target.value):
        if info.share_group:
            apart = key.target if policy is SharedTensorPolicy.UNSHARE else None
            alike = (info.share_group, apart, info.dtype, info.shape, info.regions)
            groups.setdefault(alike, []).append(key)
    return {key: keys[0] for keys in groups.values() if len(keys) > 1 for key in keys}


def _disjoint(boxes: Iterable[Region]) -> Iterator[Region]:
    taken = Coverage()
    for box in boxes:
        yield from taken.missing(box)
        taken.add(box)
