"""Hyper-rectangles: the algebra under shards, chunks and coverage.

A region is dimension-generic; coverage uses it with one dimension more, which counts the bytes
inside an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A box of `sizes[d]` indices from `offsets[d]` on, per dimension; empty if a size is 0."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region that covers a shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for 0 dimensions."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """First index behind the region, per dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as an index for arrays and tensors."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether the region lies inside a shape, with as many dimensions."""
        return (
            len(self.offsets) == len(self.sizes) == len(shape)
            and all(v >= 0 for v in (*self.offsets, *self.sizes))
            and all(end <= size for end, size in zip(self.ends, shape, strict=True))
        )

    def intersect(self, other: Region) -> Region | None:
        """Return the common part, or None if it is empty."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        sizes = tuple(e - o for o, e in zip(offsets, ends, strict=True))
        return Region(offsets, sizes) if all(s > 0 for s in sizes) else None

    def shift(self, by: Sequence[int]) -> Region:
        """Return the region moved by a vector."""
        return Region(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def relative_to(self, origin: Region) -> Region:
        """Return the region in the coordinates of `origin`, whose first element becomes 0."""
        return self.shift([-o for o in origin.offsets])

    def runs(self, start: int, length: int) -> Iterator[Region]:
        """Split a row-major run of elements of this region into boxes, in row-major order.

        Args:
            start: First element, counted row-major within the region.
            length: Number of elements; `start + length` must not exceed `numel`.

        Yields:
            At most `2 * ndim - 1` boxes whose elements, one box after the other, are the run.
        """
        if length == 0 or self.numel == 0:
            return
        if self.ndim == 0:
            yield self
            return
        stride = self.numel // self.sizes[0]
        inner = Region(self.offsets[1:], self.sizes[1:])
        row, skip = divmod(start, stride)
        if skip:
            head = min(length, stride - skip)
            yield from self._row(row, inner.runs(skip, head))
            row, length = row + 1, length - head
        rows, tail = divmod(length, stride)
        if rows:
            yield Region((self.offsets[0] + row, *inner.offsets), (rows, *inner.sizes))
        if tail:
            yield from self._row(row + rows, inner.runs(0, tail))

    def _row(self, row: int, boxes: Iterator[Region]) -> Iterator[Region]:
        for box in boxes:
            yield Region((self.offsets[0] + row, *box.offsets), (1, *box.sizes))

    def __str__(self) -> str:
        """Return the region as slices, e.g. `[0:4, 2:8]`."""
        inside = ", ".join(f"{s.start}:{s.stop}" for s in self.slices)
        return f"[{inside}]"
