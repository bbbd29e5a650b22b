from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.apply.gather import as_source
from weightsync.engines.vllm.boxes import Form, NotABoxError, View, place

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def parts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a tensor and a box of it, its axes in another order."""
    whole = torch.zeros(draw(SHAPES), dtype=torch.int32)
    view = whole
    for dim, size in enumerate(whole.shape):
        start = draw(st.integers(0, size - 1))
        view = view.narrow(dim, start, draw(st.integers(1, size - start)))
    return whole, view.permute(draw(st.permutations(range(whole.ndim))))


def view_of(tensor: torch.Tensor) -> View:
    """Return a tensor's place in its memory."""
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def form_of(tensor: torch.Tensor) -> Form:
    """Return a tensor's form."""
    return Form(tuple(tensor.shape), tensor.stride())


@given(parts(), st.data())
def test_a_placement_moves_the_elements_that_the_copy_moves(
    source_part: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    """Writing by the placement gives what copying view onto view gives."""
    source, view = source_part
    source.copy_(torch.arange(1, source.numel() + 1).view(source.shape))
    margins = data.draw(st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * view.ndim))
    sizes = [n + before + after for n, (before, after) in zip(view.shape, margins, strict=True)]
    expected = torch.zeros(sizes, dtype=torch.int32)
    dest = expected[tuple(slice(b, b + n) for n, (b, _) in zip(view.shape, margins, strict=True))]

    placement = place(view_of(view), form_of(source), view_of(dest), form_of(expected), "p")

    dest.copy_(view)
    assert placement is not None
    written = torch.zeros_like(expected)
    as_source(written, placement).copy_(source[placement.source.slices])
    assert torch.equal(written, expected)


def test_a_flat_view_becomes_a_box_of_rows() -> None:
    """A one-dimensional view over whole rows is a box of both tensors."""
    source, dest = torch.zeros(4, 6), torch.zeros(2, 4, 6)

    placement = place(
        view_of(source.view(-1)), form_of(source), view_of(dest[1].view(-1)), form_of(dest), "p"
    )

    assert placement is not None
    assert placement.source.sizes == (4, 6)
    assert placement.dest.offsets == (1, 0, 0)
    assert placement.axes == (None, 0, 1)


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(6, 4)[::2],
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(6, 4).view(-1)[2:14].view(3, 4),
        torch.zeros(4, 4).diagonal(),
    ],
)
def test_what_is_no_box_is_refused(view: torch.Tensor) -> None:
    """Steps, repeated rows, rows that wrap around and diagonals are no boxes."""
    whole = view._base if view._base is not None else view
    dest = torch.zeros(view.shape)

    with pytest.raises(NotABoxError):
        place(view_of(view), form_of(whole), view_of(dest), form_of(dest), "p")


def test_an_empty_view_has_no_place() -> None:
    """Copying no elements is no placement."""
    whole = torch.zeros(3, 4)
    part = view_of(whole[:0])
    assert place(part, form_of(whole), part, form_of(whole), "p") is None


def test_a_scalar_lies_in_an_element() -> None:
    """A tensor without dimensions goes into one element of a parameter."""
    scalar, dest = torch.zeros(()), torch.zeros(3)

    placement = place(view_of(scalar), form_of(scalar), view_of(dest[2]), form_of(dest), "p")

    assert placement is not None
    assert placement.dest.offsets == (2,)
    assert math.prod(placement.source.sizes) == 1
