from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from tests.property.boxes import indices, regions_of, shapes, union
from weightsync.core.coverage import Coverage
from weightsync.core.regions import Region

Case = tuple[list[Region], Region]
cases = shapes().flatmap(lambda s: st.tuples(st.lists(regions_of(s), max_size=8), regions_of(s)))


@given(cases)
def test_coverage_is_a_set(case: Case) -> None:
    """After any additions, overlaps, missing, covers, numel and boxes are those of a set."""
    added, asked = case
    coverage, model = Coverage(), set()
    for region in added:
        coverage.add(region)
        model |= set(indices(region))
        assert union(coverage.boxes) == model
        assert coverage.numel == len(model)
        assert bool(coverage) == bool(model)
    wanted = set(indices(asked))
    assert union(coverage.overlaps(asked)) == wanted & model
    assert union(coverage.missing(asked)) == wanted - model
    assert coverage.covers(asked) == (wanted <= model)


@given(cases.flatmap(lambda case: st.tuples(st.just(case[0]), st.permutations(case[0]))))
def test_order_does_not_matter(orders: tuple[list[Region], list[Region]]) -> None:
    """The same regions in another order give the same boxes, in row-major order."""
    first, second = map(Coverage, orders)
    assert first.boxes == second.boxes
    assert list(first.boxes) == sorted(first.boxes, key=lambda box: box.offsets)


@given(cases)
def test_what_is_missing_completes(case: Case) -> None:
    """Adding what is missing of a region covers it and nothing else, and costs no box for it."""
    added, asked = case
    coverage = Coverage(added)
    before = coverage.numel
    missing = coverage.missing(asked)
    for box in missing:
        coverage.add(box)
    assert coverage.covers(asked)
    assert coverage.numel == before + sum(box.numel for box in missing)


def chunks(region: Region, length: int) -> Iterator[list[Region]]:
    """Yield the boxes of consecutive runs."""
    for start in range(0, region.numel, length):
        yield list(region.runs(start, min(length, region.numel - start)))


@given(shapes(min_dims=1).flatmap(regions_of), st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_a_stream_in_order_stays_few_boxes(region: Region, length: int, itemsize: int) -> None:
    """Chunks of bytes that arrive in order are never more boxes than one run, and one at last."""
    whole = Region((*region.offsets, 0), (*region.sizes, itemsize))
    coverage = Coverage()
    for boxes in chunks(whole, length):
        for box in boxes:
            coverage.add(box)
        assert len(coverage.boxes) <= 2 * whole.ndim - 1
    assert coverage.boxes == ((whole,) if whole.numel else ())


@st.composite
def shards(draw: st.DrawFn) -> tuple[Region, list[Region]]:
    """Draw a shape and its shards along one dimension, of any sizes, in any order."""
    shape = draw(shapes(min_dims=1, max_size=8))
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=6)))
    bounds = [0, *cuts, shape[dim]]
    parts = [
        Region(
            tuple(start if d == dim else 0 for d in range(len(shape))),
            tuple(end - start if d == dim else n for d, n in enumerate(shape)),
        )
        for start, end in itertools.pairwise(bounds)
    ]
    return Region.whole(shape), draw(st.permutations(parts))


@given(shards())
def test_shards_in_any_order_become_one_box(case: tuple[Region, list[Region]]) -> None:
    """Row or column shards are never more boxes than shards, and the whole at last."""
    whole, parts = case
    coverage = Coverage()
    for count, part in enumerate(parts, 1):
        coverage.add(part)
        assert len(coverage.boxes) <= count
    assert coverage.boxes == ((whole,) if whole.numel else ())
