from __future__ import annotations

import random

import pytest

from weightsync.core.coverage import Coverage
from weightsync.core.regions import Region


def test_empty_coverage() -> None:
    """Nothing is covered at first, and all of a region is missing."""
    coverage = Coverage()
    region = Region((1, 2), (3, 4))
    assert not coverage
    assert (coverage.numel, coverage.boxes, coverage.overlaps(region)) == (0, (), [])
    assert coverage.missing(region) == [region]
    assert not coverage.covers(region)


def test_a_region_without_elements_is_always_covered() -> None:
    """An empty shard needs nothing and adds nothing (B43)."""
    coverage = Coverage()
    coverage.add(Region((0, 0), (0, 4)))
    assert not coverage
    assert coverage.covers(Region((2, 0), (3, 0)))


def test_scalar() -> None:
    """A 0-dim tensor is missing or covered as a whole."""
    coverage = Coverage()
    scalar = Region((), ())
    assert coverage.missing(scalar) == [scalar]
    coverage.add(scalar)
    assert coverage.boxes == (scalar,)
    assert (coverage.missing(scalar), coverage.overlaps(scalar)) == ([], [scalar])


def test_repeated_bytes_count_once() -> None:
    """Writing the same region again changes nothing."""
    coverage = Coverage([Region((0,), (4,))])
    coverage.add(Region((2,), (4,)))
    coverage.add(Region((0,), (6,)))
    assert (coverage.numel, coverage.boxes) == (6, (Region((0,), (6,)),))


def test_a_gap_is_named() -> None:
    """What lies between two shards is missing, as one box over all columns (B54)."""
    coverage = Coverage([Region((0, 0), (2, 8)), Region((5, 0), (3, 8))])
    assert coverage.missing(Region.whole((8, 8))) == [Region((2, 0), (3, 8))]


def test_half_a_row_is_not_a_row() -> None:
    """A stream that ends within a row leaves the rest of the row and the rows behind (B65)."""
    whole = Region.whole((4, 6))
    coverage = Coverage(whole.runs(0, 9))
    assert coverage.missing(whole) == list(whole.runs(9, 15))


GAPS = 5_000
HOSTILE = {
    "bytes with gaps": [Region((2 * i,), (1,)) for i in range(GAPS)],
    "within one row": [Region((0, 2 * i), (1, 1)) for i in range(GAPS)],
    "columns": [Region((0, 2 * i), (1000, 1)) for i in range(GAPS)],
    "diagonal": [Region((i, i), (1, 1)) for i in range(GAPS)],
}


@pytest.mark.parametrize("regions", HOSTILE.values(), ids=HOSTILE.keys())
def test_many_boxes_that_never_meet(regions: list[Region]) -> None:
    """Thousands of boxes with gaps, in any order, are kept one by one without a standstill."""
    shuffled = random.Random(1).sample(regions, len(regions))  # noqa: S311
    coverage = Coverage()
    for region in shuffled:
        assert coverage.missing(region) == [region]
        coverage.add(region)
    assert sorted(coverage.boxes, key=lambda box: box.offsets) == regions


def test_rows_and_columns_together() -> None:
    """A comb of rows crossed by a comb of columns is counted right."""
    coverage = Coverage(Region((2 * i, 0), (1, 100)) for i in range(50))
    for i in range(50):
        coverage.add(Region((0, 2 * i), (100, 1)))
    assert coverage.numel == 50 * 100 + 50 * 100 - 50 * 50
    assert len(coverage.missing(Region.whole((100, 100)))) == 50 * 50
