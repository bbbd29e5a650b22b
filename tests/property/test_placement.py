from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.property.boxes import Index, indices, regions_of
from weightsync.core.regions import Region
from weightsync.layout.plan import Placement


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Draw a box of 0 to 3 real dimensions, with thin ones put in on both sides, in any order."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=3))
    count = st.integers(0, 2)
    source_dims = draw(st.permutations([*range(len(sizes)), *[None] * draw(count)]))
    dest_dims = draw(st.permutations([*range(len(sizes)), *[None] * draw(count)]))

    def box(dims: list[int | None]) -> Region:
        offsets = tuple(draw(st.integers(0, 3)) for _ in dims)
        return Region(offsets, tuple(1 if d is None else sizes[d] for d in dims))

    axes = tuple(None if d is None else source_dims.index(d) for d in dest_dims)
    return Placement(box(source_dims), "parameter", box(dest_dims), axes)


def mapped(placement: Placement, index: Index) -> Index:
    """Map one element of the tensor to the parameter, straight from the definition."""
    return tuple(
        start + (0 if a is None else index[a] - placement.source.offsets[a])
        for start, a in zip(placement.dest.offsets, placement.axes, strict=True)
    )


@given(placements())
def test_source_and_dest_are_one_to_one(placement: Placement) -> None:
    """Every element of the source lies on one element of the dest, and all of those are hit."""
    hit = [mapped(placement, index) for index in indices(placement.source)]
    assert sorted(hit) == indices(placement.dest)
    assert placement.to_dest(placement.source) == placement.dest
    assert placement.to_source(placement.dest) == placement.source


@given(placements(), st.data())
def test_boxes_map_element_by_element(placement: Placement, data: st.DataObject) -> None:
    """A box of the source maps to the box of exactly its elements, and back to itself."""
    box = data.draw(regions_of(placement.source.sizes)).shift(placement.source.offsets)
    if box.numel:
        there = placement.to_dest(box)
        assert sorted(mapped(placement, index) for index in indices(box)) == indices(there)
        assert placement.to_source(there) == box


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple))
def test_identity(shape: Index) -> None:
    """The identity maps every element to itself."""
    placement = Placement.identity("parameter", shape)
    assert all(mapped(placement, index) == index for index in indices(Region.whole(shape)))


@given(placements(), st.data())
def test_one_after_the_other(first: Placement, data: st.DataObject) -> None:
    """Two placements make one that maps each element as they do in turn."""
    box = data.draw(regions_of(first.dest.sizes)).shift(first.dest.offsets)
    if box.numel:
        axes = tuple(data.draw(st.permutations(range(box.ndim))))
        dest = Region((0,) * box.ndim, tuple(box.sizes[a] for a in axes))
        second = Placement(box, "other", dest, axes)
        both = second.after(first)
        assert both.dest == dest
        for index in indices(both.source):
            assert mapped(both, index) == mapped(second, mapped(first, index))
