"""From strided views, as loaders of checkpoints make them, to boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.core.regions import Region
from weightsync.layout.plan import Placement

Shape = tuple[int, ...]


class NotABoxError(ValueError):
    """A view that is no box of its tensor, e.g. every second row, or a row that is repeated."""


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and strides of a whole tensor, in elements."""

    shape: Shape
    strides: Shape

    @classmethod
    def contiguous(cls, shape: Shape) -> Form:
        """Return the form of a row-major tensor."""
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
        return cls(shape, tuple(strides))

    @property
    def axes(self) -> list[int]:
        """The dimensions of more than one index, from the longest stride to the shortest."""
        wide = [d for d, size in enumerate(self.shape) if size > 1]
        return sorted(wide, key=lambda d: -self.strides[d])


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a tensor's memory, in elements."""

    offset: int
    sizes: Shape
    strides: Shape


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dimension that two views of equal sizes have in common."""

    size: int
    strides: tuple[int, int]


def place(
    source: View, source_form: Form, dest: View, dest_form: Form, parameter: str
) -> Placement | None:
    """Return the placement that copies one view onto another; None if they are empty.

    Args:
        source: Within the checkpoint's tensor.
        source_form: Form of that tensor.
        dest: Within the parameter; of the same sizes as `source`.
        dest_form: Form of the parameter.
        parameter: Its name.

    Raises:
        NotABoxError: a view is no box of its tensor.
    """
    if 0 in source.sizes:
        return None
    forms = (source_form, dest_form)
    todo = [
        _Dim(size, (step, dest_step))
        for size, step, dest_step in zip(source.sizes, source.strides, dest.strides, strict=True)
        if size > 1
    ]
    lengths: tuple[dict[int, int], dict[int, int]] = ({}, {})
    pairs: dict[int, int] = {}
    while todo:
        dim = todo.pop()
        axes = [_axis(form, stride) for form, stride in zip(forms, dim.strides, strict=True)]
        fit = min(form.shape[axis] for form, axis in zip(forms, axes, strict=True))
        if dim.size > fit:
            # One dimension of the views runs over several of a tensor: split off the innermost.
            todo += _split(dim, fit)
            continue
        for side, axis in zip(lengths, axes, strict=True):
            if axis in side:
                raise NotABoxError(f"dimension {axis} is walked twice")
            side[axis] = dim.size
        pairs[axes[1]] = axes[0]
    return Placement(
        _region(source_form, source.offset, lengths[0]),
        parameter,
        _region(dest_form, dest.offset, lengths[1]),
        tuple(pairs.get(d) for d in range(len(dest_form.shape))),
    )


def _axis(form: Form, stride: int) -> int:
    for axis in form.axes:
        if form.strides[axis] == stride:
            return axis
    raise NotABoxError(f"stride {stride} is none of {form}")


def _split(dim: _Dim, inner: int) -> Sequence[_Dim]:
    if dim.size % inner:
        raise NotABoxError(f"{dim.size} elements do not end with a row of {inner}")
    outer = tuple(stride * inner for stride in dim.strides)
    return _Dim(dim.size // inner, (outer[0], outer[1])), _Dim(inner, dim.strides)


def _region(form: Form, offset: int, lengths: dict[int, int]) -> Region:
    starts = [0] * len(form.shape)
    for axis in form.axes:
        starts[axis], offset = divmod(offset, form.strides[axis])
    region = Region(tuple(starts), tuple(lengths.get(d, 1) for d in range(len(form.shape))))
    if offset or not region.fits(form.shape):
        raise NotABoxError(f"{region} leaves {form}")
    return region
