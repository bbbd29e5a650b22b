from __future__ import annotations

import pytest

from weightsync.core.dtypes import DType, Kind, check_cast
from weightsync.core.errors import DTypeMismatchError


@pytest.mark.parametrize("dtype", DType)
def test_every_type_is_complete(dtype: DType) -> None:
    """Each type has a size that its name agrees with, a kind, and torch's name (B45)."""
    digits = "".join(c for c in dtype.name.split("_")[0] if c.isdigit())
    bits = int(digits) if digits else 8
    assert dtype.itemsize == max(1, bits // 8)
    assert isinstance(dtype.kind, Kind)
    assert str(dtype) == dtype.name.lower()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (DType.BOOL, Kind.BOOL),
        (DType.INT8, Kind.SIGNED),
        (DType.UINT64, Kind.UNSIGNED),
        (DType.BFLOAT16, Kind.FLOAT),
        (DType.FLOAT8_E8M0FNU, Kind.FLOAT),
        (DType.FLOAT4_E2M1FN_X2, Kind.PACKED),
        (DType.COMPLEX64, Kind.COMPLEX),
    ],
)
def test_kinds(dtype: DType, kind: Kind) -> None:
    """The kind follows what an element is, not how it is stored."""
    assert dtype.kind is kind


@pytest.mark.parametrize("dtype", DType)
def test_the_same_type_always_passes(dtype: DType) -> None:
    """No permission is needed where nothing is cast."""
    check_cast(dtype, dtype, allowed=False, name="w")


def test_a_cast_needs_leave() -> None:
    """A cast that could be done is refused with both types and the remedy, unless allowed (B41)."""
    with pytest.raises(DTypeMismatchError, match=r"'w' is bfloat16 .* float32; .*cast=ALLOW"):
        check_cast(DType.FLOAT32, DType.BFLOAT16, allowed=False, name="w")
    check_cast(DType.FLOAT32, DType.BFLOAT16, allowed=True, name="w")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (DType.FLOAT32, DType.INT8),
        (DType.FLOAT32, DType.BOOL),
        (DType.INT32, DType.FLOAT32),
        (DType.COMPLEX64, DType.FLOAT32),
        (DType.FLOAT32, DType.COMPLEX64),
        (DType.INT64, DType.INT32),
        (DType.INT8, DType.UINT8),
        (DType.UINT8, DType.INT8),
        (DType.UINT8, DType.BOOL),
        (DType.FLOAT32, DType.FLOAT4_E2M1FN_X2),
        (DType.FLOAT4_E2M1FN_X2, DType.UINT8),
    ],
)
def test_casts_that_nobody_can_mean(source: DType, target: DType) -> None:
    """What would wrap, cut or reinterpret values is refused even when casts are allowed (B41)."""
    with pytest.raises(DTypeMismatchError, match="never done"):
        check_cast(source, target, allowed=True, name="w")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (DType.FLOAT16, DType.FLOAT8_E4M3FN),
        (DType.FLOAT8_E8M0FNU, DType.FLOAT32),
        (DType.COMPLEX128, DType.COMPLEX64),
        (DType.INT8, DType.INT64),
        (DType.UINT8, DType.UINT16),
        (DType.UINT8, DType.INT16),
    ],
)
def test_casts_that_are_done(source: DType, target: DType) -> None:
    """Floats become floats, complex become complex, integers become ones that hold them all."""
    check_cast(source, target, allowed=True, name="w")
