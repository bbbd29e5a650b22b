"""Parts of larger arrays: selections, shards, and padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from weightsync.core.regions import Region
from weightsync.layout.plan import Placement
from weightsync.layout.sources import Assembly, Scope, Shape, Source, replaced, size_of


@dataclass(frozen=True, slots=True)
class Select:
    """Some indices of a larger array along a dimension, in any order.

    For parts of a tensor whose rest lies in other parameters or on other workers, and for rows
    that the checkpoint has in another order, such as gate and up row by row:
    `Select(w13, 0, (range(0, 8, 2), range(1, 8, 2)), 8)`.

    Attributes:
        source: The larger array.
        dim: The dimension.
        ranges: The indices within the source, one range after the other.
        size: Size of the source along the dimension.
    """

    source: Source
    dim: int
    ranges: tuple[range, ...]
    size: int

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array with those indices."""
        wanted = size_of(shape, self.dim)
        if sum(map(len, self.ranges)) != wanted:
            raise ValueError(f"{sum(map(len, self.ranges))} selected indices do not make {wanted}")
        if any(index not in range(self.size) for r in self.ranges if r for index in (r[0], r[-1])):
            raise ValueError(f"indices {self.ranges} are not all below {self.size}")
        outer = replaced(shape, self.dim, self.size)
        built = self.source.build(outer, scope)
        result = Assembly(dict(built.tensors))
        start = 0
        for first, length in _runs(self.ranges):
            slab = Region(
                replaced((0,) * len(shape), self.dim, first), replaced(shape, self.dim, length)
            )
            by = replaced((0,) * len(shape), self.dim, start - first)
            result.add(built, partial(_cut, slab=slab, by=by))
            start += length
        return result


@dataclass(frozen=True, slots=True)
class Pad:
    """An array with padding behind it along a dimension; the padding is never written.

    Attributes:
        source: The array without padding.
        dim: The dimension.
        size: Size of the source along it.
    """

    source: Source
    dim: int
    size: int

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the first `size` indices."""
        if not 0 <= self.size <= size_of(shape, self.dim):
            raise ValueError(f"{self.size} is more than {shape[self.dim]}, padding included")
        return self.source.build(replaced(shape, self.dim, self.size), scope)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal parts of a larger array along a dimension.

    Attributes:
        source: The larger array.
        dim: The dimension.
        rank: Which part.
        size: Number of ranks.
        replicas: Neighbouring ranks that hold the same part, e.g. 2 for 4 ranks and 2 kv heads.
        total: Size of the source along the dimension, if the last parts have padding behind it.
    """

    source: Source
    dim: int
    rank: int
    size: int
    replicas: int = 1
    total: int | None = None

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array with that part."""
        if not 0 <= self.rank < self.size or self.replicas < 1 or self.size % self.replicas:
            raise ValueError(
                f"no part for rank {self.rank} of {self.size} with {self.replicas} replicas"
            )
        local = size_of(shape, self.dim)
        padded = local * (self.size // self.replicas)
        total = padded if self.total is None else self.total
        if not 0 <= total <= padded:
            raise ValueError(f"{total} does not fit into {self.size} parts of {local}")
        start = min(self.rank // self.replicas * local, total)
        rows = range(start, min(start + local, total))
        part = Select(self.source, self.dim, (rows,), total)
        return Pad(part, self.dim, len(rows)).build(shape, scope)


def _cut(place: Placement, slab: Region, by: Shape) -> Placement | None:
    common = place.dest.intersect(slab)
    if common is None:
        return None
    return Placement(place.to_source(common), place.parameter, common.shift(by), place.axes)


def _runs(ranges: Sequence[range]) -> Iterator[tuple[int, int]]:
    """Yield (first, length) of the consecutive indices, so that contiguous rows stay one box."""
    first = length = 0
    for indices in ranges:
        pieces = [(indices.start, len(indices))] if indices.step == 1 else [(i, 1) for i in indices]
        for start, count in pieces:
            if length and start == first + length:
                length += count
                continue
            if length:
                yield first, length
            first, length = start, count
    if length:
        yield first, length
