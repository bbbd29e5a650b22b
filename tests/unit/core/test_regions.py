from __future__ import annotations

import pytest

from weightsync.core.regions import Region


def test_whole_covers_a_shape() -> None:
    """The region of a shape starts at 0 and counts the shape's elements."""
    whole = Region.whole((2, 3))
    assert (whole.offsets, whole.sizes, whole.numel, whole.ends) == ((0, 0), (2, 3), 6, (2, 3))


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((0,), 0), ((4, 0), 0)])
def test_scalars_and_empty_shapes_are_ordinary(shape: tuple[int, ...], numel: int) -> None:
    """A 0-dim region has one element, one with a size of 0 has none (B43)."""
    assert Region.whole(shape).numel == numel
    assert Region.whole(shape).fits(shape)


def test_sizes_beyond_machine_words_are_exact() -> None:
    """Counts are Python integers: 2**63 elements by 2**63 do not wrap."""
    assert Region.whole((2**63, 2**63)).numel == 2**126


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ((-1, 0), (1, 1)),
        ((0, 0), (1, -1)),
        ((0, 4), (1, 1)),
        ((0, 2**63), (1, 2**63)),
        ((0,), (1,)),
        ((0, 0, 0), (1, 1, 1)),
        ((0, 0), (1,)),
        ((0,), (1, 1)),
    ],
)
def test_what_leaves_a_shape_does_not_fit(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Negative numbers, ends behind the shape and other numbers of dimensions do not fit."""
    assert not Region(offsets, sizes).fits((3, 4))


def test_an_empty_region_at_the_end_fits() -> None:
    """An empty shard may start where the tensor ends."""
    assert Region((3, 0), (0, 4)).fits((3, 4))


def test_regions_that_touch_do_not_intersect() -> None:
    """Neighbours have nothing in common."""
    assert Region((0, 0), (2, 2)).intersect(Region((2, 0), (2, 2))) is None


def test_runs_of_rows() -> None:
    """A run from the middle of a row to the middle of another is rest, rows, start of a row."""
    boxes = [str(box) for box in Region((10, 0), (4, 5)).runs(3, 14)]
    assert boxes == ["[10:11, 3:5]", "[11:13, 0:5]", "[13:14, 0:2]"]


def test_run_of_a_scalar() -> None:
    """The one element of a scalar is a run of length 1; a run of length 0 is no box."""
    assert list(Region((), ()).runs(0, 1)) == [Region((), ())]
    assert list(Region((), ()).runs(0, 0)) == []


def test_slices_and_text_agree() -> None:
    """A region is shown as the slices that it is."""
    region = Region((1, 2), (3, 4))
    assert region.slices == (slice(1, 4), slice(2, 6))
    assert str(region) == "[1:4, 2:6]"
