from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.core.dtypes import DType, Kind, check_cast
from weightsync.core.errors import DTypeMismatchError

dtypes = st.sampled_from(DType)


def casts(source: DType, target: DType) -> bool:
    """Tell whether a session that allows casts does this one."""
    try:
        check_cast(source, target, allowed=True, name="w")
    except DTypeMismatchError:
        return False
    return True


@given(dtypes, dtypes, st.booleans())
def test_every_pair_has_an_answer(source: DType, target: DType, allowed: bool) -> None:
    """Any pair is either let through or refused with both names, and only equals without leave."""
    if source is target or (allowed and casts(source, target)):
        check_cast(source, target, allowed=allowed, name="layers.0.w")
        return
    with pytest.raises(DTypeMismatchError) as caught:
        check_cast(source, target, allowed=allowed, name="layers.0.w")
    assert caught.value.subjects == ("layers.0.w",)
    for word in ("layers.0.w", str(source), str(target)):
        assert word in str(caught.value)


@given(dtypes, dtypes, dtypes)
def test_casts_compose(a: DType, b: DType, c: DType) -> None:
    """What may be cast in two steps may be cast in one."""
    if casts(a, b) and casts(b, c):
        assert casts(a, c)


@given(dtypes, dtypes)
def test_kinds_are_not_left(source: DType, target: DType) -> None:
    """Bool and packed types are never cast; others keep their kind, or unsigned becomes signed."""
    if source is not target and casts(source, target):
        kinds = {source.kind, target.kind}
        assert not kinds & {Kind.BOOL, Kind.PACKED}
        assert len(kinds) == 1 or (source.kind, target.kind) == (Kind.UNSIGNED, Kind.SIGNED)


@given(dtypes, dtypes)
def test_integers_keep_every_value(source: DType, target: DType) -> None:
    """An integer is cast exactly if every value of its type is one of the other."""
    integers = (Kind.SIGNED, Kind.UNSIGNED)
    if source.kind in integers and target.kind in integers:
        a, b = values(source), values(target)
        assert casts(source, target) == (b.start <= a.start and a.stop <= b.stop)


def values(dtype: DType) -> range:
    """Return the values of an integer type."""
    bits = 8 * dtype.itemsize
    if dtype.kind is Kind.SIGNED:
        return range(-(1 << bits - 1), 1 << bits - 1)
    return range(1 << bits)
