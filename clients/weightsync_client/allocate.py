"""Tensors in a worker's arena, for a trainer that computes straight into it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from weightsync.core.errors import UnknownTensorError, UnsupportedError
from weightsync.core.types import Target, TensorKey
from weightsync.core.views import PlacedPart, TensorPlacement
from weightsync_client.arenas import MappedArena
from weightsync_client.sources.torch_array import to_torch


def allocate(
    arena: MappedArena, target: Target, names: Collection[str] | None
) -> dict[str, torch.Tensor]:
    """Return tensors of a target by the worker's names: the named ones, or all that can be had.

    Each has the worker's element type and the tensor's global shape. To push one copies nothing.

    Raises:
        UnknownTensorError: a named tensor may not be placed in this session, or does not exist.
        UnsupportedError: of a named tensor the worker holds a part only, or more than one copy.
    """
    wanted = (
        names if names is not None else [key.name for key in arena.keys if key.target is target]
    )
    made: dict[str, torch.Tensor] = {}
    for name in wanted:
        placement = arena.find(TensorKey(target, name))
        if placement is None:
            raise UnknownTensorError(
                f"the {target} has no tensor {name!r} that this session can place in the arena",
                subjects=[name],
            )
        part = _whole(placement)
        if part is not None:
            made[name] = _tensor(arena.memory, placement, part)
        elif names is not None:
            raise UnsupportedError(
                f"the worker does not hold {name!r} as one whole tensor: push it from memory of"
                " your own",
                subjects=[name],
            )
    return made


def _whole(placement: TensorPlacement) -> PlacedPart | None:
    parts = [part for part in placement.parts if part.region.numel]
    if len(parts) == 1 and parts[0].region.sizes == placement.shape:
        return parts[0]
    return None


def _tensor(memory: memoryview, placement: TensorPlacement, part: PlacedPart) -> torch.Tensor:
    size = placement.dtype.itemsize
    dtype = to_torch(placement.dtype)
    # Blocks begin at cache lines, so that every offset and stride is one of whole elements.
    length = 1 + sum(
        (n - 1) * (s // size) for n, s in zip(placement.shape, part.strides, strict=True)
    )
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=length * size, offset=part.offset)
    return torch.as_strided(
        flat.view(dtype), placement.shape, [stride // size for stride in part.strides]
    )
