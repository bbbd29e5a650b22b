"""Which elements of an array, or bytes, have been written.

A set of indices is kept in bands: along the first dimension as disjoint spans, each with the set
that holds for all indices of the span in the dimensions behind it; neighbouring spans with equal
sets are one. So equal sets look equal however they came about, shards and chunks that meet stay
one box, and an addition looks only at the spans that it touches, found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from weightsync.core.regions import Region


class Coverage:
    """A set of elements of one array; its boxes are disjoint and in row-major order.

    Safe to read while one thread adds: a reader sees the set before or after the addition.
    """

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        """Start with some regions."""
        self._bands: _Bands | None = None
        for region in regions:
            self.add(region)

    def __bool__(self) -> bool:
        """Tell whether anything is covered."""
        return self._bands is not None

    @property
    def boxes(self) -> tuple[Region, ...]:
        """The covered elements as disjoint boxes."""
        return tuple(_boxes(self._bands))

    @property
    def numel(self) -> int:
        """Number of covered elements."""
        return self._bands.numel if self._bands else 0

    @property
    def num_boxes(self) -> int:
        """Number of `boxes`, without making them: a few additions may cross in very many."""
        return self._bands.num_boxes if self._bands else 0

    def copy(self) -> Coverage:
        """Return the same set, to which more may be added."""
        copy = Coverage()
        copy._bands = self._bands
        return copy

    def steps(self, region: Region) -> int:
        """Return how much work a region makes, at most, in boxes that are looked at."""
        return 1 + _steps(self._bands, box) if (box := _of(region)) else 1

    def overlaps(self, region: Region) -> list[Region]:
        """Return the part of a region that is covered, as disjoint boxes."""
        box = _of(region)
        if box is None or self._bands is None:
            return []
        return [region] if box is self._bands else list(_boxes(_common(self._bands, box)))

    def missing(self, region: Region) -> list[Region]:
        """Return the part of a region that is not covered, as disjoint boxes."""
        box = _of(region)
        if box is None or box is self._bands:
            return []
        return [region] if self._bands is None else list(_boxes(_holes(self._bands, box)))

    def covers(self, region: Region) -> bool:
        """Tell whether every element of a region is covered."""
        return not self.missing(region)

    def add(self, region: Region) -> None:
        """Cover a region; what is covered already is counted once."""
        box = _of(region)
        if box is not None and box is not self._bands:
            self._bands = _union(self._bands, box)


class _Span(NamedTuple):
    """Indices `start` to `end` (exclusive) of one dimension, all with the same set behind them."""

    start: int
    end: int
    inner: _Bands


class _Bands(NamedTuple):
    """A set that is not empty; None stands for the empty one."""

    numel: int
    num_boxes: int
    spans: tuple[_Span, ...]


_POINT = _Bands(1, 1, ())
"""The one element of an array without dimensions."""

_start: Callable[[_Span], int] = attrgetter("start")
_end: Callable[[_Span], int] = attrgetter("end")


# A model has many tensors of few forms: whole ones then have one and the same set.
@lru_cache(maxsize=4096)
def _of(region: Region) -> _Bands | None:
    """Return the set of a region: one span per dimension, one in the other."""
    if not region.numel:
        return None
    bands = _POINT
    for start, size in zip(reversed(region.offsets), reversed(region.sizes), strict=True):
        bands = _Bands(size * bands.numel, 1, (_Span(start, start + size, bands),))
    return bands


def _boxes(bands: _Bands | None) -> Iterator[Region]:
    if bands is _POINT:
        yield Region((), ())
    elif bands:
        for start, end, inner in bands.spans:
            for box in _boxes(inner):
                yield Region((start, *box.offsets), (end - start, *box.sizes))


def _steps(bands: _Bands | None, box: _Bands) -> int:
    if bands is None or bands is _POINT:
        return 0
    start, end, inner = box.spans[0]
    first = bisect_left(bands.spans, start, key=_end)
    last = bisect_right(bands.spans, end, key=_start)
    behind = {id(span.inner): span.inner for span in bands.spans[first:last]}
    # To copy a span takes a hundredth of the time that it takes to look at one.
    steps = last - first + len(bands.spans) // 128
    return steps + sum(_steps(found, inner) for found in behind.values())


def _union(bands: _Bands | None, box: _Bands) -> _Bands:
    if bands is None or bands is _POINT:
        return box
    start, end, _ = box.spans[0]
    # Spans that only touch the box belong to it too: they may become one with a part of it.
    first = bisect_left(bands.spans, start, key=_end)
    last = bisect_right(bands.spans, end, key=_start)
    touched = bands.spans[first:last]
    pieces: list[tuple[int, int, _Bands | None]] = list(_pieces(bands, box, _union))
    if touched and touched[0].start < start:
        pieces.insert(0, (touched[0].start, min(touched[0].end, start), touched[0].inner))
    if touched and touched[-1].end > end:
        pieces.append((max(touched[-1].start, end), touched[-1].end, touched[-1].inner))
    spans = _joined(pieces)
    return _Bands(
        bands.numel - _numel(touched) + _numel(spans),
        bands.num_boxes - _num_boxes(touched) + _num_boxes(spans),
        bands.spans[:first] + spans + bands.spans[last:],
    )


def _common(bands: _Bands | None, box: _Bands) -> _Bands | None:
    if bands is None or bands is _POINT:
        return bands
    return _bands(_joined(_pieces(bands, box, _common)))


def _holes(bands: _Bands | None, box: _Bands) -> _Bands | None:
    if bands is None:
        return box
    if bands is _POINT:
        return None
    return _bands(_joined(_pieces(bands, box, _holes)))


def _pieces(
    bands: _Bands, box: _Bands, operation: Callable[[_Bands | None, _Bands], _Bands | None]
) -> Iterator[tuple[int, int, _Bands | None]]:
    """Yield the box span by span, with the result of an operation on what lies behind each."""
    start, end, inner = box.spans[0]
    # Many spans may have one and the same set behind them.
    results: dict[int, _Bands | None] = {}
    for low, high, behind in _cut(bands.spans, start, end):
        if id(behind) not in results:
            results[id(behind)] = operation(behind, inner)
        yield low, high, results[id(behind)]


def _cut(
    spans: tuple[_Span, ...], start: int, end: int
) -> Iterator[tuple[int, int, _Bands | None]]:
    """Yield the indices from `start` to `end` in spans, those between the given ones included."""
    first = bisect_right(spans, start, key=_end)
    last = bisect_left(spans, end, lo=first, key=_start)
    for span in spans[first:last]:
        if span.start > start:
            yield start, span.start, None
        yield max(span.start, start), min(span.end, end), span.inner
        start = span.end
    if start < end:
        yield start, end, None


def _joined(pieces: Iterable[tuple[int, int, _Bands | None]]) -> tuple[_Span, ...]:
    """Return the pieces that are not empty, neighbours with equal sets as one."""
    spans: list[_Span] = []
    for start, end, inner in pieces:
        if inner is None:
            continue
        if spans and spans[-1].end == start and spans[-1].inner == inner:
            spans[-1] = spans[-1]._replace(end=end)
        else:
            spans.append(_Span(start, end, inner))
    return tuple(spans)


def _bands(spans: tuple[_Span, ...]) -> _Bands | None:
    return _Bands(_numel(spans), _num_boxes(spans), spans) if spans else None


def _numel(spans: Iterable[_Span]) -> int:
    return sum((end - start) * inner.numel for start, end, inner in spans)


def _num_boxes(spans: Iterable[_Span]) -> int:
    return sum(inner.num_boxes for _, _, inner in spans)
