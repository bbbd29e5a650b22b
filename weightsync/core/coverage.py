"""Which bytes of a box have been written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weightsync.core.regions import Region


class Coverage:
    """A set of elements of one array, kept as disjoint boxes.

    Boxes are merged when they meet, so that shards and chunks that arrive in order stay one box.
    Not thread-safe: the owner holds a lock.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._boxes: list[Region] = []

    @property
    def boxes(self) -> tuple[Region, ...]:
        """The disjoint boxes."""
        return tuple(self._boxes)

    @property
    def numel(self) -> int:
        """Number of covered elements."""
        return sum(box.numel for box in self._boxes)

    def overlaps(self, region: Region) -> list[Region]:
        """Return the parts of a region that are covered already."""
        return [common for box in self._boxes if (common := box.intersect(region))]

    def missing(self, region: Region) -> list[Region]:
        """Return disjoint boxes of a region that are not covered."""
        return list(subtract_all(region, self._boxes))

    def covers(self, region: Region) -> bool:
        """Tell whether every element of a region is covered."""
        return not any(True for _ in subtract_all(region, self._boxes))

    def add(self, region: Region) -> None:
        """Cover a region; what is covered already is counted once."""
        for piece in self.missing(region):
            self._insert(piece)

    def _insert(self, piece: Region) -> None:
        # Newest first: the next chunk of a stream continues the box of the one before.
        index = len(self._boxes) - 1
        while index >= 0:
            merged = self._boxes[index].merge(piece)
            if merged is None:
                index -= 1
                continue
            del self._boxes[index]
            piece = merged
            index = len(self._boxes) - 1
        self._boxes.append(piece)


def subtract_all(region: Region, holes: Iterable[Region]) -> Iterator[Region]:
    """Yield disjoint boxes of a region that lie in none of the holes."""
    rest = [region] if region.numel else []
    for hole in holes:
        rest = [piece for box in rest for piece in box.subtract(hole)]
        if not rest:
            return
    yield from rest
