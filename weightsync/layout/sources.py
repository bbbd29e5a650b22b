"""How an engine parameter is put together from checkpoint tensors, as small composable sources.

A source knows how to fill an array of a given shape. Shapes run downwards, from the parameter to
the tensors, so that a rule seldom has to state any; places of elements run upwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        total = _size(shape, self.dim)
        sizes = self.sizes
        if sizes is None:
            if not self.parts or total % len(self.parts):
                raise ValueError(f"{total} does not divide into {len(self.parts)} equal parts")
            sizes = (total // len(self.parts),) * len(self.parts)
        if len(sizes) != len(self.parts) or min(sizes, default=0) < 0 or sum(sizes) != total:
            raise ValueError(f"{len(self.parts)} parts of sizes {sizes} do not make up {total}")
        result, start = Assembly(), 0
        for part, size in zip(self.parts, sizes, strict=True):
            built = part.build(_replaced(shape, self.dim, size), scope)
            by = _replaced((0,) * len(shape), self.dim, start)
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
        for index in range(_size(shape, self.dim)):
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


@dataclass(frozen=True, slots=True)
class Select:
    """Some indices of a larger array along a dimension, in any order.

    For parts of a tensor whose rest lies in other parameters or on other workers, and for rows
    that the checkpoint has in another order, such as gate and up row by row:
    `Select(w13, 0, (range(0, 8, 2), range(1, 8, 2)), 8)`.

    Attributes:
        source: The larger array.
        dim: The dimension.
        ranges: The indices within the source, one range after the other.
        size: Size of the source along the dimension.
    """

    source: Source
    dim: int
    ranges: tuple[range, ...]
    size: int

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array with those indices."""
        wanted = _size(shape, self.dim)
        if sum(map(len, self.ranges)) != wanted:
            raise ValueError(f"{sum(map(len, self.ranges))} selected indices do not make {wanted}")
        if any(index not in range(self.size) for r in self.ranges if r for index in (r[0], r[-1])):
            raise ValueError(f"indices {self.ranges} are not all below {self.size}")
        outer = _replaced(shape, self.dim, self.size)
        built = self.source.build(outer, scope)
        result = Assembly(dict(built.tensors))
        start = 0
        for first, length in _runs(self.ranges):
            slab = Region(
                _replaced((0,) * len(shape), self.dim, first), _replaced(shape, self.dim, length)
            )
            by = _replaced((0,) * len(shape), self.dim, start - first)
            result.add(built, partial(_cut, slab=slab, by=by))
            start += length
        return result


@dataclass(frozen=True, slots=True)
class Pad:
    """An array with padding behind it along a dimension; the padding is never written.

    Attributes:
        source: The array without padding.
        dim: The dimension.
        size: Size of the source along it.
    """

    source: Source
    dim: int
    size: int

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the first `size` indices."""
        if not 0 <= self.size <= _size(shape, self.dim):
            raise ValueError(f"{self.size} is more than {shape[self.dim]}, padding included")
        return self.source.build(_replaced(shape, self.dim, self.size), scope)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal parts of a larger array along a dimension.

    Attributes:
        source: The larger array.
        dim: The dimension.
        rank: Which part.
        size: Number of ranks.
        replicas: Neighbouring ranks that hold the same part, e.g. 2 for 4 ranks and 2 kv heads.
        total: Size of the source along the dimension, if the last parts have padding behind it.
    """

    source: Source
    dim: int
    rank: int
    size: int
    replicas: int = 1
    total: int | None = None

    def build(self, shape: Shape, scope: Scope) -> Assembly:
        """Fill the array with that part."""
        if not 0 <= self.rank < self.size or self.replicas < 1 or self.size % self.replicas:
            raise ValueError(
                f"no part for rank {self.rank} of {self.size} with {self.replicas} replicas"
            )
        local = _size(shape, self.dim)
        padded = local * (self.size // self.replicas)
        total = padded if self.total is None else self.total
        if not 0 <= total <= padded:
            raise ValueError(f"{total} does not fit into {self.size} parts of {local}")
        start = min(self.rank // self.replicas * local, total)
        rows = range(start, min(start + local, total))
        part = Select(self.source, self.dim, (rows,), total)
        return Pad(part, self.dim, len(rows)).build(shape, scope)


def _size(shape: Shape, dim: int) -> int:
    if not 0 <= dim < len(shape):
        raise ValueError(f"{shape} has no dimension {dim}")
    return shape[dim]


def _replaced(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def _inserted(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim:])


def _picked(values: Shape, dims: Sequence[int]) -> Shape:
    return tuple(values[d] for d in dims)


def _shifted(place: Placement, by: Shape) -> Placement:
    return Placement(place.source, place.parameter, place.dest.shift(by), place.axes)


def _cut(place: Placement, slab: Region, by: Shape) -> Placement | None:
    common = place.dest.intersect(slab)
    if common is None:
        return None
    return Placement(place.to_source(common), place.parameter, common.shift(by), place.axes)


def _runs(ranges: Sequence[range]) -> Iterator[tuple[int, int]]:
    """Yield (first, length) of the consecutive indices, so that contiguous rows stay one box."""
    first = length = 0
    for indices in ranges:
        pieces = [(indices.start, len(indices))] if indices.step == 1 else [(i, 1) for i in indices]
        for start, count in pieces:
            if length and start == first + length:
                length += count
                continue
            if length:
                yield first, length
            first, length = start, count
    if length:
        yield first, length
