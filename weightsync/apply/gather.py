"""Live tensors out again, in the order of the wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import xxhash

from weightsync.apply.bits import PIECE_BYTES, as_array, bits
from weightsync.arena.arena import Bytes
from weightsync.core.regions import Region
from weightsync.layout.plan import Placement, TensorPlan


def held_regions(plan: TensorPlan) -> Iterator[tuple[Region, Placement]]:
    """Yield the regions of a tensor that this worker holds, each with one place of it."""
    seen: set[Region] = set()
    for placement in plan.placements:
        if placement.source not in seen:
            seen.add(placement.source)
            yield placement.source, placement


def row_major(live: Mapping[str, torch.Tensor], placement: Placement) -> Iterator[Bytes]:
    """Yield the bytes of a placement's source region, row-major, in pieces of bounded size.

    A piece is a view of live memory where that is possible: it shows later changes.
    """
    for piece in _slabs(as_source(live[placement.parameter], placement)):
        yield as_array(piece.contiguous().view(-1).cpu()).view(np.uint8)


def digest(live: Mapping[str, torch.Tensor], placement: Placement) -> bytes:
    """Return XXH3-128 of a placement's source region, row-major: 16 bytes, big-endian."""
    state = xxhash.xxh3_128()
    for piece in row_major(live, placement):
        state.update(piece.data)
    return state.digest()


def as_source(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return the bits of a placement as a view that has the axes of the checkpoint's tensor."""
    box = bits(tensor)[placement.dest.slices]
    thick = box[tuple(0 if a is None else slice(None) for a in placement.axes)]
    used = [a for a in placement.axes if a is not None]
    ordered = thick.permute([used.index(a) for a in sorted(used)])
    return ordered.reshape(placement.source.sizes) if _splits(ordered, placement) else ordered


def _splits(ordered: torch.Tensor, placement: Placement) -> bool:
    return ordered.ndim != placement.source.ndim


def _slabs(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return
    if nbytes <= PIECE_BYTES or tensor.ndim == 0:
        yield tensor
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    rows = max(1, PIECE_BYTES * tensor.shape[0] // nbytes)
    for start in range(0, tensor.shape[0], rows):
        slab = tensor[start : start + rows]
        if rows == 1 and slab.ndim > 1:
            yield from _slabs(slab[0])
        else:
            yield slab
