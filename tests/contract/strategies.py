"""Hypothesis strategies for the words of the contract."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from weightsync.core.dtypes import DType
from weightsync.core.regions import Region
from weightsync.core.types import Segment, Target

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
target_sets = st.frozensets(st.sampled_from(Target))
# Times and spans that the wire can hold: whole nanoseconds.
times = st.integers(0, 2**31).map(float)
spans = st.integers(0, 10**12).map(lambda nanos: nanos / 10**9)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Draw a region that fits a shape."""
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(
        draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    return Region(offsets, sizes)


any_regions = shapes.flatmap(regions)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Draw a segment that is right in itself."""
    shape = draw(shapes)
    dtype = draw(st.sampled_from(DType))
    region = draw(st.one_of(st.just(Region.whole(shape)), regions(shape)))
    available = math.prod(region.sizes) * dtype.itemsize
    offset = draw(st.integers(0, available))
    length = draw(st.integers(0, available - offset))
    return Segment(draw(st.sampled_from(Target)), draw(names), dtype, shape, region, offset, length)


@st.composite
def payloads(draw: st.DrawFn) -> tuple[list[Segment], list[bytes]]:
    """Draw segments and the bytes of each."""
    table = draw(st.lists(segments(), max_size=5))
    return table, [draw(st.binary(min_size=s.byte_length, max_size=s.byte_length)) for s in table]
