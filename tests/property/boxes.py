"""Strategies for shapes and regions, and the sets of indices that they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from weightsync.core.regions import Region

Index = tuple[int, ...]


def indices(region: Region) -> list[Index]:
    """Return all indices of a region, in row-major order."""
    return list(itertools.product(*(range(s.start, s.stop) for s in region.slices)))


def union(regions: Iterable[Region]) -> set[Index]:
    """Return the indices of regions, which must be disjoint."""
    result: set[Index] = set()
    for region in regions:
        members = set(indices(region))
        assert len(members) == region.numel
        assert not members & result, "regions overlap"
        result |= members
    return result


def shapes(min_dims: int = 0, max_dims: int = 3, max_size: int = 5) -> st.SearchStrategy[Index]:
    """Draw a shape; a size may be 0."""
    return st.lists(st.integers(0, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def regions_of(draw: st.DrawFn, shape: Sequence[int]) -> Region:
    """Draw a region inside a shape; it may be empty."""
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
