"""From a run of bytes of a tensor to the boxes of storage where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from weightsync.arena.arena import Bytes
from weightsync.arena.block import Block, in_bytes
from weightsync.core.dtypes import DType
from weightsync.core.errors import InvalidRequestError, OverlapConflictError
from weightsync.core.regions import Region
from weightsync.core.types import Segment
from weightsync.layout.plan import Placement, TensorPlan

Cast = Callable[[Bytes, DType, DType], Bytes]
"""Turns the bytes of elements of one type into those of another."""

# A transposed copy is many times faster by elements than by bytes.
_ELEMENT = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(slots=True)
class Copy:
    """One copy into a block; `source` and `dest` have the same shape.

    Attributes:
        block: Where to.
        box: What it fills, in bytes of the block.
        dest: View of the block's memory.
        source: View of the payload; None: the bytes are there already.
        known: Parts of `box` that are there before this copy: they must be equal.
    """

    block: Block
    box: Region
    dest: Bytes
    source: Bytes | None
    known: list[Region]

    def run(self) -> None:
        """Copy. The interpreter is free meanwhile.

        Raises:
            OverlapConflictError: what is there already is not what is being sent.
        """
        if self.source is None:
            return
        for part in self.known:
            inner = part.relative_to(self.box).slices
            if not np.array_equal(self.dest[inner], self.source[inner]):
                raise OverlapConflictError(
                    f"bytes sent for {self.block.key} at {part} (the last dimension counts bytes)"
                    " differ from bytes that this session holds already; send each element once,"
                    " or the same value under every name of a shared storage",
                    subjects=[str(self.block.key)],
                )
        dtype = _ELEMENT.get(self.dest.shape[-1])
        linear = self.source.flags.c_contiguous and self.dest.flags.c_contiguous
        if dtype is not None and self.source.strides[-1] == 1 and not linear:
            np.copyto(self.dest.view(dtype), self.source.view(dtype))
        else:
            np.copyto(self.dest, self.source)


def claims(
    segment: Segment, plan: TensorPlan, block_of: Callable[[Placement], Block]
) -> Iterator[Copy]:
    """Yield what a segment fills whose bytes are in place already; no byte is moved."""
    region = in_bytes(segment.region, segment.dtype)
    for box in region.runs(segment.byte_offset, segment.byte_length):
        for block, dest, _, _ in _places(box, plan, block_of):
            yield Copy(block, dest, block.memory[dest.slices], None, [])


def scatter(
    segment: Segment,
    plan: TensorPlan,
    data: memoryview,
    block_of: Callable[[Placement], Block],
    cast: Cast,
) -> Iterator[Copy]:
    """Yield the copies that put a segment's bytes in place.

    Bytes that no placement of this worker holds are dropped.

    Args:
        segment: What the bytes are; checked against `plan` by the caller.
        plan: The tensor.
        data: `segment.byte_length` bytes.
        block_of: Where a placement's parameter is staged.
        cast: Used if the segment's type is not the plan's.

    Raises:
        InvalidRequestError: a cast would split an element.
    """
    itemsize = segment.dtype.itemsize
    casts = segment.dtype is not plan.dtype
    if not casts and segment.is_whole and plan.is_parameter:
        block = block_of(plan.placements[0])
        if block.memory.shape[:-1] == plan.shape:
            # Most tensors; a model may have many thousand small ones.
            piece = np.frombuffer(data, np.uint8).reshape(block.memory.shape)
            yield Copy(block, block.whole, block.memory, piece, [])
            return
    if casts and (segment.byte_offset % itemsize or segment.byte_length % itemsize):
        raise InvalidRequestError(
            f"tensor {segment.name!r} is cast from {segment.dtype} to {plan.dtype}: segments must"
            f" then hold whole elements of {itemsize} bytes; cut the message elsewhere",
            subjects=["segments.byte_offset"],
        )
    start = 0
    region = in_bytes(segment.region, segment.dtype)
    for box in region.runs(segment.byte_offset, segment.byte_length):
        piece = np.frombuffer(data, np.uint8, box.numel, start)
        start += box.numel
        if casts:
            piece = cast(piece, segment.dtype, plan.dtype)
            box = Region(box.offsets, (*box.sizes[:-1], plan.dtype.itemsize))  # noqa: PLW2901
        yield from _place(box, piece.reshape(box.sizes), plan, block_of)


def _place(
    box: Region, piece: Bytes, plan: TensorPlan, block_of: Callable[[Placement], Block]
) -> Iterator[Copy]:
    elements = Region(box.offsets[:-1], box.sizes[:-1])
    for block, dest, placement, common in _places(box, plan, block_of):
        source = arrange(piece[common.relative_to(elements).slices], placement)
        yield Copy(block, dest, block.memory[dest.slices], source, [])


def _places(
    box: Region, plan: TensorPlan, block_of: Callable[[Placement], Block]
) -> Iterator[tuple[Block, Region, Placement, Region]]:
    """Yield where a box of bytes lies: block, box in it, placement, and its part of the tensor."""
    elements = Region(box.offsets[:-1], box.sizes[:-1])
    first, count = box.offsets[-1], box.sizes[-1]
    for placement in plan.placements:
        common = elements.intersect(placement.source)
        if common is not None:
            dest = placement.to_dest(common)
            inside = Region((*dest.offsets, first), (*dest.sizes, count))
            yield block_of(placement), inside, placement, common


def arrange(source: Bytes, placement: Placement) -> Bytes:
    """Turn an array over a tensor's axes (and one more) into one over the parameter's axes."""
    used = [a for a in placement.axes if a is not None]
    unused = [d for d in range(placement.source.ndim) if d not in used]
    moved = source.transpose(*unused, *used, source.ndim - 1)[(0,) * len(unused)]
    arranged: Bytes = moved[
        (*(None if a is None else slice(None) for a in placement.axes), slice(None))
    ]
    return arranged
