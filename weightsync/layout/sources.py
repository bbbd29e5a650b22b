"""How an engine parameter is put together from checkpoint tensors, as small composable sources.

A source knows how to fill an array of a given shape. Shapes run downwards, from the parameter to
the tensors, so that a rule seldom has to state any; places of elements run upwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from weightsync.core.regions import Region
from weightsync.layout.plan import Placement

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """What a source is being built for.

    Attributes:
        parameter: Name of the engine's parameter.
        expand: Fills the groups of the rule's pattern into a name.
        rename: From the finished name to that of the checkpoint.
        indices: Numbers that replace each `*` of a name, from left to right.
    """

    parameter: str
    expand: Callable[[str], str] = str
    rename: Callable[[str], str] = str
    indices: tuple[int, ...] = ()

    def name(self, template: str) -> str:
        """Return the checkpoint name that a template stands for."""
        text = self.expand(template)
        for index in self.indices:
            text = text.replace("*", str(index), 1)
        return self.rename(text)

    def at(self, index: int) -> Scope:
        """Return the scope of one element of a stack."""
        return replace(self, indices=(*self.indices, index))


@dataclass(slots=True)
class Assembly:
    """An array, and which elements of which checkpoint tensors lie where in it.

    Attributes:
        tensors: Shape by checkpoint name, also of tensors that have no element here.
        pieces: Name of a tensor and its place; elements that are in no piece are padding.
    """

    tensors: dict[str, Shape] = field(default_factory=dict)
    pieces: list[tuple[str, Placement]] = field(default_factory=list)

    def add(self, other: Assembly, move: Callable[[Placement], Placement | None]) -> None:
        """Take over the tensors of another array, and those places that `move` keeps."""
        for name, shape in other.tensors.items():
            if self.tensors.setdefault(name, shape) != shape:
                raise ValueError(f"tensor {name!r} would be both {self.tensors[name]} and {shape}")
        for name, placement in other.pieces:
            if moved := move(placement):
                self.pieces.append((name, moved))


class Source(Protocol):
    """Something that fills an array."""

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill an array of that shape.

        Raises:
            ValueError: the source can't have that shape.
        """


@dataclass(frozen=True, slots=True)
class Tensor:
    r"""A whole checkpoint tensor.

    Attributes:
        name: Its name. Groups of the rule's pattern (`\1`, `\g<0>`) are filled in; each `*` is the
            number within a `Stack`, the outermost stack's first.
    """

    name: str

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array with the tensor."""
        name = scope.name(self.name)
        return Assembly({name: shape}, [(name, Placement.identity(scope.parameter, shape))])


@dataclass(frozen=True, slots=True)
class Concat:
    """Arrays one behind the other along a dimension, e.g. q, k and v, or gate and up.

    Attributes:
        parts: The arrays.
        dim: The dimension.
        sizes: Size of each part along it; None if all are equal.
    """

    parts: tuple[Source, ...]
    dim: int
    sizes: tuple[int, ...] | None = None

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array part by part."""
        total = size_of(shape, self.dim)
        sizes = self.sizes
        if sizes is None:
            if not self.parts or total % len(self.parts):
                raise ValueError(f"{total} does not divide into {len(self.parts)} equal parts")
            sizes = (total // len(self.parts),) * len(self.parts)
        if len(sizes) != len(self.parts) or min(sizes, default=0) < 0 or sum(sizes) != total:
            raise ValueError(f"{len(self.parts)} parts of sizes {sizes} do not make up {total}")
        result, start = Assembly(), 0
        for part, size in zip(self.parts, sizes, strict=True):
            built = part.build(replaced(shape, self.dim, size), scope)
            by = replaced((0,) * len(shape), self.dim, start)
            result.add(built, partial(_shifted, by=by))
            start += size
        return result


@dataclass(frozen=True, slots=True)
class Stack:
    """Arrays of one dimension less, one for each index of a dimension, e.g. experts.

    Attributes:
        part: The array of each index; `*` in its names is the index.
        dim: The dimension.
        first: Number of index 0, for a worker that holds the experts from there on.
    """

    part: Source
    dim: int = 0
    first: int = 0

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array index by index."""
        inner = (*shape[: self.dim], *shape[self.dim + 1 :])
        result = Assembly()
        for index in range(size_of(shape, self.dim)):
            built = self.part.build(inner, scope.at(self.first + index))
            result.add(built, partial(self._inserted, index=index))
        return result

    def _inserted(self, place: Placement, index: int) -> Placement:
        dest = Region(
            _inserted(place.dest.offsets, self.dim, index), _inserted(place.dest.sizes, self.dim, 1)
        )
        axes = (*place.axes[: self.dim], None, *place.axes[self.dim :])
        return Placement(place.source, place.parameter, dest, axes)


@dataclass(frozen=True, slots=True)
class Unstack:
    """One index of an array of one dimension more: the opposite of `Stack`.

    Attributes:
        whole: The array.
        dim: Its dimension that is missing here.
        index: The index.
        size: Size of the dimension.
    """

    whole: Source
    dim: int
    index: int
    size: int

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array with that index."""
        if not (0 <= self.dim <= len(shape) and 0 <= self.index < self.size):
            raise ValueError(f"{shape} can't be index {self.index} of {self.size} at {self.dim}")
        outer = _inserted(shape, self.dim, self.size)
        slab = Region(
            _inserted((0,) * len(shape), self.dim, self.index), _inserted(shape, self.dim, 1)
        )
        result = Assembly()
        result.add(self.whole.build(outer, scope), partial(self._dropped, slab=slab))
        return result

    def _dropped(self, place: Placement, slab: Region) -> Placement | None:
        common = place.dest.intersect(slab)
        if common is None:
            return None
        keep = [d for d in range(common.ndim) if d != self.dim]
        return Placement(
            place.to_source(common),
            place.parameter,
            Region(_picked(common.offsets, keep), _picked(common.sizes, keep)),
            tuple(place.axes[d] for d in keep),
        )


@dataclass(frozen=True, slots=True)
class Transpose:
    """An array with its dimensions in another order.

    Attributes:
        source: The array.
        dims: For each dimension of the result the one of the source, as in `numpy.transpose`.
    """

    source: Source
    dims: tuple[int, ...]

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array in the other order."""
        if sorted(self.dims) != list(range(len(shape))):
            raise ValueError(f"{self.dims} is no order of the dimensions of {shape}")
        inverse = [self.dims.index(d) for d in range(len(shape))]
        result = Assembly()
        result.add(self.source.build(_picked(shape, inverse), scope), self._turned)
        return result

    def _turned(self, place: Placement) -> Placement:
        dest = Region(_picked(place.dest.offsets, self.dims), _picked(place.dest.sizes, self.dims))
        axes = tuple(place.axes[d] for d in self.dims)
        return Placement(place.source, place.parameter, dest, axes)


def size_of(shape: Shape, dim: int) -> int:
    """Return the size of a dimension.

    Raises:
        ValueError: the shape has no such dimension.
    """
    if not 0 <= dim < len(shape):
        raise ValueError(f"{shape} has no dimension {dim}")
    return shape[dim]


def replaced(values: Shape, dim: int, value: int) -> Shape:
    """Return values with another one at a place."""
    return (*values[:dim], value, *values[dim + 1 :])


def _inserted(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim:])


def _picked(values: Shape, dims: Sequence[int]) -> Shape:
    return tuple(values[d] for d in dims)


def _shifted(place: Placement, by: Shape) -> Placement:
    return Placement(place.source, place.parameter, place.dest.shift(by), place.axes)
