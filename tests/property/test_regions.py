from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.property.boxes import indices, regions_of, shapes
from weightsync.core.regions import Region

pairs = shapes().flatmap(lambda shape: st.tuples(regions_of(shape), regions_of(shape)))


@given(pairs)
def test_intersection(pair: tuple[Region, Region]) -> None:
    """The intersection holds exactly the indices of both, and None stands for none."""
    a, b = pair
    common = a.intersect(b)
    assert (set(indices(common)) if common else set()) == set(indices(a)) & set(indices(b))
    assert common is None or common.numel > 0


@given(shapes(max_dims=4).flatmap(regions_of), st.data())
def test_runs(region: Region, data: st.DataObject) -> None:
    """The boxes of a run are, one after the other, exactly its elements in row-major order."""
    start = data.draw(st.integers(0, region.numel))
    length = data.draw(st.integers(0, region.numel - start))
    boxes = list(region.runs(start, length))
    assert [i for box in boxes for i in indices(box)] == indices(region)[start : start + length]
    assert len(boxes) <= max(1, 2 * region.ndim - 1)


@given(shapes(max_dims=2).flatmap(regions_of), st.sampled_from([1, 2, 4, 8, 16]), st.data())
def test_runs_of_bytes(region: Region, itemsize: int, data: st.DataObject) -> None:
    """With a dimension for the bytes of an element, runs may start and end inside elements."""
    in_bytes = Region((*region.offsets, 0), (*region.sizes, itemsize))
    cuts = sorted(data.draw(st.lists(st.integers(0, in_bytes.numel), max_size=3)))
    bounds = [0, *cuts, in_bytes.numel]
    runs = [box for a, b in itertools.pairwise(bounds) for box in in_bytes.runs(a, b - a)]
    assert [i for box in runs for i in indices(box)] == indices(in_bytes)


@given(shapes().flatmap(lambda s: st.tuples(st.just(s), regions_of(s))))
def test_fits(case: tuple[tuple[int, ...], Region]) -> None:
    """A region inside a shape fits it; moved by the shape it only does if it is empty."""
    shape, region = case
    assert region.fits(shape)
    assert not region.shift([n + 1 for n in shape]).fits(shape) or not shape


@given(shapes().flatmap(regions_of), st.data())
def test_relative_to(region: Region, data: st.DataObject) -> None:
    """Coordinates relative to an origin are undone by a shift by the origin's offsets."""
    by = data.draw(st.tuples(*(st.integers(0, 9) for _ in region.sizes)))
    origin = Region(by, region.sizes)
    moved = region.shift(by)
    assert moved.relative_to(origin) == region
    assert indices(moved) == [
        tuple(i + b for i, b in zip(index, by, strict=True)) for index in indices(region)
    ]
