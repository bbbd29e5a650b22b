"""The one table of element types, for both directions of the wire."""

from __future__ import annotations

import enum

from weightsync.core.errors import DTypeMismatchError


class Kind(enum.Enum):
    """What an element is, for the rules of casting."""

    BOOL = "bool"
    SIGNED = "signed integer"
    UNSIGNED = "unsigned integer"
    FLOAT = "float"
    COMPLEX = "complex"
    PACKED = "packed"


class DType(enum.Enum):
    """Element types; numbers are those of `weightsync.v1.DataType`, names torch's in capitals."""

    BOOL = 1
    INT8 = 2
    INT16 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6
    UINT16 = 7
    UINT32 = 8
    UINT64 = 9
    FLOAT16 = 10
    BFLOAT16 = 11
    FLOAT32 = 12
    FLOAT64 = 13
    FLOAT8_E4M3FN = 14
    FLOAT8_E4M3FNUZ = 15
    FLOAT8_E5M2 = 16
    FLOAT8_E5M2FNUZ = 17
    FLOAT8_E8M0FNU = 18
    FLOAT4_E2M1FN_X2 = 19
    COMPLEX64 = 20
    COMPLEX128 = 21

    # Members are singletons; the hash of an enum would be a call into Python per look-up.
    __hash__ = object.__hash__

    @property
    def itemsize(self) -> int:
        """Bytes per element as stored; the packed fp4 pair counts as one element of one byte."""
        return _ITEMSIZE[self]

    @property
    def kind(self) -> Kind:
        """What an element is."""
        return _KIND[self]

    def __str__(self) -> str:
        """Return torch's name, e.g. `bfloat16`."""
        return self.name.lower()


_ITEMSIZE = {
    DType.BOOL: 1,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.UINT8: 1,
    DType.UINT16: 2,
    DType.UINT32: 4,
    DType.UINT64: 8,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E4M3FNUZ: 1,
    DType.FLOAT8_E5M2: 1,
    DType.FLOAT8_E5M2FNUZ: 1,
    DType.FLOAT8_E8M0FNU: 1,
    DType.FLOAT4_E2M1FN_X2: 1,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
}


def _kind(dtype: DType) -> Kind:
    for prefix, kind in (
        ("BOOL", Kind.BOOL),
        ("INT", Kind.SIGNED),
        ("UINT", Kind.UNSIGNED),
        ("FLOAT4", Kind.PACKED),
        ("FLOAT", Kind.FLOAT),
        ("BFLOAT", Kind.FLOAT),
        ("COMPLEX", Kind.COMPLEX),
    ):
        if dtype.name.startswith(prefix):
            return kind
    raise AssertionError(dtype)


_KIND = {dtype: _kind(dtype) for dtype in DType}


def check_cast(source: DType, target: DType, *, allowed: bool, name: str) -> None:
    """Refuse a cast that the session does not allow or that nobody can mean.

    Allowed are float to float (scales like e8m0 included), complex to complex, and an integer to
    one that holds every value of the source.

    Raises:
        DTypeMismatchError: with both types and the remedy.
    """
    if source is target:
        return
    text = f"tensor {name!r} is {target} on the worker but was sent as {source}"
    if not allowed:
        raise DTypeMismatchError(
            f"{text}; send {target}, or start the session with cast=ALLOW", subjects=[name]
        )
    if not _keeps_meaning(source, target):
        raise DTypeMismatchError(
            f"{text}; this cast would change values and is never done: send {target}",
            subjects=[name],
        )


def _keeps_meaning(source: DType, target: DType) -> bool:
    kinds = (source.kind, target.kind)
    if kinds in ((Kind.FLOAT, Kind.FLOAT), (Kind.COMPLEX, Kind.COMPLEX)):
        return True
    if kinds in ((Kind.SIGNED, Kind.SIGNED), (Kind.UNSIGNED, Kind.UNSIGNED)):
        return source.itemsize <= target.itemsize
    return kinds == (Kind.UNSIGNED, Kind.SIGNED) and source.itemsize < target.itemsize
