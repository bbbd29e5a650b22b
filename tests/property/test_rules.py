"""Rules against the arrays that they stand for, made of nested dicts from index to element."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tests.property.boxes import Index, indices, union
from weightsync.core.dtypes import DType
from weightsync.core.regions import Region
from weightsync.layout.plan import Layout, ParameterSpec
from weightsync.layout.rules import Rule, plan
from weightsync.layout.selections import Pad, Select, Shard
from weightsync.layout.sources import Concat, Source, Stack, Tensor, Transpose, Unstack

Element = tuple[str, Index]
"""An element's identity: tensor and index in it."""


@dataclass(frozen=True)
class Array:
    """A shape and its elements; padding has none."""

    shape: Index
    elements: dict[Index, Element]


def tensor(name: str, shape: Index) -> Array:
    """Return a tensor of unique elements."""
    return Array(shape, {index: (name, index) for index in indices(Region.whole(shape))})


Case = tuple[Source, Array]
"""A source, and the array that it should fill, made by plain means of its own."""

small_shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@st.composite
def cases(draw: st.DrawFn, depth: int = 3) -> Case:
    """Draw a tensor or a stack, in up to three wrappings."""
    leaf = draw(st.sampled_from([single, stacked]))
    case = leaf(draw, f"t{depth}")
    for level in range(draw(st.integers(0, depth))):
        wrapping = draw(st.sampled_from([joined, transposed, unstacked, padded, sharded, selected]))
        if 0 not in case[1].shape and case[1].shape:
            case = wrapping(draw, *case, f"t{level}")
    return case


def single(draw: st.DrawFn, name: str) -> Case:
    """Draw a tensor."""
    return Tensor(name), tensor(name, draw(small_shapes))


def stacked(draw: st.DrawFn, name: str) -> Case:
    """Draw a stack of tensors."""
    shape, first, count = draw(small_shapes), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    dim = draw(st.integers(0, len(shape)))
    elements = {
        (*index[:dim], n, *index[dim:]): element
        for n in range(count)
        for index, element in tensor(f"{name}.{first + n}", shape).elements.items()
    }
    outer = (*shape[:dim], count, *shape[dim:])
    return Stack(Tensor(f"{name}.*"), dim, first), Array(outer, elements)


def joined(draw: st.DrawFn, source: Source, inner: Array, name: str) -> Case:
    """Put a tensor before or behind an array."""
    dim = a_dim(draw, inner)
    other = tensor(name, resized(inner.shape, dim, draw(st.integers(0, 3))))
    parts: list[Case] = [(source, inner), (Tensor(name), other)]
    if draw(st.booleans()):
        parts.reverse()
    start, elements = 0, {}
    for _, array in parts:
        for i, element in array.elements.items():
            elements[resized(i, dim, i[dim] + start)] = element
        start += array.shape[dim]
    sizes = tuple(array.shape[dim] for _, array in parts)
    equal = len(set(sizes)) == 1 and draw(st.booleans())
    concat = Concat(tuple(part for part, _ in parts), dim, None if equal else sizes)
    return concat, Array(resized(inner.shape, dim, start), elements)


def transposed(draw: st.DrawFn, source: Source, inner: Array, _: str) -> Case:
    """Put the dimensions into another order."""
    dims = draw(st.permutations(range(len(inner.shape))))
    elements = {tuple(i[d] for d in dims): element for i, element in inner.elements.items()}
    return Transpose(source, tuple(dims)), Array(tuple(inner.shape[d] for d in dims), elements)


def unstacked(draw: st.DrawFn, source: Source, inner: Array, _: str) -> Case:
    """Take one index of a dimension."""
    dim = a_dim(draw, inner)
    index = draw(st.integers(0, inner.shape[dim] - 1))
    elements = {
        (*i[:dim], *i[dim + 1 :]): element
        for i, element in inner.elements.items()
        if i[dim] == index
    }
    shape = (*inner.shape[:dim], *inner.shape[dim + 1 :])
    return Unstack(source, dim, index, inner.shape[dim]), Array(shape, elements)


def padded(draw: st.DrawFn, source: Source, inner: Array, _: str) -> Case:
    """Put padding behind an array."""
    dim = a_dim(draw, inner)
    size = inner.shape[dim]
    shape = resized(inner.shape, dim, size + draw(st.integers(0, 2)))
    return Pad(source, dim, size), Array(shape, inner.elements)


def sharded(draw: st.DrawFn, source: Source, inner: Array, _: str) -> Case:
    """Take one rank's part; the last parts may be padded."""
    dim = a_dim(draw, inner)
    size, replicas, parts = inner.shape[dim], draw(st.integers(1, 2)), draw(st.integers(1, 4))
    rank = draw(st.integers(0, parts * replicas - 1))
    local = -(-size // parts)
    rows = list(range(size))[rank // replicas * local :][:local]
    shard = Shard(source, dim, rank, parts * replicas, replicas, total=size)
    return shard, Array(resized(inner.shape, dim, local), taken(inner, dim, rows))


def selected(draw: st.DrawFn, source: Source, inner: Array, _: str) -> Case:
    """Take some indices of a dimension, in any order (B52)."""
    dim = a_dim(draw, inner)
    size = inner.shape[dim]
    rows = draw(st.permutations(range(size)))[: draw(st.integers(0, size))]
    select = Select(source, dim, tuple(as_ranges(rows)), size)
    return select, Array(resized(inner.shape, dim, len(rows)), taken(inner, dim, rows))


def a_dim(draw: st.DrawFn, array: Array) -> int:
    """Draw a dimension."""
    return draw(st.integers(0, len(array.shape) - 1))


def resized(values: Index, dim: int, value: int) -> Index:
    """Return values with another one at a place."""
    return (*values[:dim], value, *values[dim + 1 :])


def taken(array: Array, dim: int, rows: list[int]) -> dict[Index, Element]:
    """Return the elements of some rows, which become rows 0, 1, ..."""
    return {
        resized(i, dim, rows.index(i[dim])): element
        for i, element in array.elements.items()
        if i[dim] in rows
    }


def as_ranges(rows: list[int]) -> Iterator[range]:
    """Write rows as ranges, of two rows each where that is possible, whatever their step."""
    for pair in (rows[n : n + 2] for n in range(0, len(rows), 2)):
        if len(pair) == 1:
            yield range(pair[0], pair[0] + 1)
        else:
            first, second = pair
            step = second - first
            yield range(first, second + (1 if step > 0 else -1), step)


def filled(layout: Layout, parameter: str, *, composite: bool = False) -> dict[Index, Element]:
    """Apply the placements of a parameter, element by element; each is written once."""
    elements: dict[Index, Element] = {}
    for tensor_plan in layout.tensors.values():
        for placement in tensor_plan.placements:
            if placement.parameter != parameter or tensor_plan.composite != composite:
                continue
            for index in indices(placement.source):
                (dest,) = indices(placement.to_dest(Region(index, (1,) * len(index))))
                assert dest not in elements
                elements[dest] = (tensor_plan.name, index)
    return elements


def spec(name: str, shape: Index) -> ParameterSpec:
    """Return a parameter with a storage of its own."""
    return ParameterSpec(name, DType.BFLOAT16, shape, name)


@given(cases())
def test_placements_do_what_the_rule_says(case: Case) -> None:
    """Placing all elements of all tensors gives the array made by plain concat, stack, ..."""
    source, array = case
    layout = plan([spec("p", array.shape)], [Rule("p", source)])
    assert filled(layout, "p") == array.elements


@given(cases())
def test_dests_cover_the_parameter_once(case: Case) -> None:
    """The boxes that tensors reach are disjoint and leave out exactly the padding."""
    source, array = case
    layout = plan([spec("p", array.shape)], [Rule("p", source, composite=Tensor("p"))])
    placements = [p for t in layout.tensors.values() if not t.composite for p in t.placements]
    assert union(p.dest for p in placements) == set(array.elements)
    assert filled(layout, "p", composite=True) == tensor("p", array.shape).elements


@given(st.integers(1, 4), st.integers(1, 2), st.integers(0, 9), st.integers(0, 3), st.booleans())
def test_all_ranks_together_hold_the_tensor(
    parts: int, replicas: int, rows: int, padding: int, column: bool
) -> None:
    """The shards of all ranks hold each element once per replica, padding aside (B50, B53)."""
    dim = 1 if column else 0
    local = -(-rows // parts) + padding
    shape = resized((3, 3), dim, local)
    held: list[Element] = []
    for rank in range(parts * replicas):
        source = Shard(Tensor("w"), dim, rank, parts * replicas, replicas, total=rows)
        layout = plan([spec("p", shape)], [Rule("p", source)])
        held += filled(layout, "p").values()
        assert layout.tensors["w"].shape == resized((3, 3), dim, rows)
    whole = tensor("w", resized((3, 3), dim, rows)).elements.values()
    assert sorted(held) == sorted(list(whole) * replicas)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_one_tensor_over_several_parameters(sizes: list[int], width: int) -> None:
    """A fused checkpoint tensor is split over the parameters that hold its parts."""
    ends = list(itertools.accumulate(sizes))
    rules = [
        Rule(f"p{n}", Select(Tensor("fused"), 0, (range(end - size, end),), ends[-1]))
        for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    specs = [spec(f"p{n}", (size, width)) for n, size in enumerate(sizes)]
    layout = plan(specs, rules)
    assert list(layout.tensors) == ["fused"]
    elements = [e for s in specs for _, e in sorted(filled(layout, s.name).items())]
    assert elements == list(tensor("fused", (ends[-1], width)).elements.values())
