"""Segments in both directions, and every check that needs no worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from weightsync.core.dtypes import DType
from weightsync.core.errors import (
    InvalidRequestError,
    OutOfBoundsError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.core.regions import Region
from weightsync.core.types import Encoding, Limits, Segment, Target
from weightsync.v1 import types_pb2
from weightsync.wire.convert import (
    enum_from_proto,
    parse_message,
    region_from_proto,
    region_to_proto,
)

# A trainer sends the same table of segments with every update: a few bytes to be looked up
# instead of parsed. Long segments are not kept, so that nobody can fill the memory with them.
_REMEMBERED = 1 << 15
_LONGEST_REMEMBERED = 512

_MAX_TENSOR_BYTES = (1 << 63) - 1


def segment_to_proto(segment: Segment) -> types_pb2.Segment:
    """Return a segment's message; the region of a whole tensor is left out."""
    whole = segment.region.sizes == segment.shape
    return types_pb2.Segment(
        target=types_pb2.Target.ValueType(segment.target.value),
        name=segment.name,
        dtype=types_pb2.DataType.ValueType(segment.dtype.value),
        shape=segment.shape,
        region=None if whole else region_to_proto(segment.region),
        byte_offset=segment.byte_offset,
        byte_length=segment.byte_length,
        encoding=types_pb2.Encoding.ValueType(segment.encoding.value),
        placed=segment.placed,
    )


@lru_cache(maxsize=_REMEMBERED)
def serialize_segment(segment: Segment) -> bytes:
    """Return a segment's own bytes, as they stand behind its tag and length."""
    return segment_to_proto(segment).SerializeToString()


@lru_cache(maxsize=4)
def segment_reader(limits: Limits) -> Callable[[bytes, int], Segment]:
    """Return a function from a segment's bytes, and its index in the message, to the segment.

    The function raises:
        MalformedPayloadError: no message.
        InvalidRequestError: a field is missing, unknown or over a limit; subjects name it.
        OutOfBoundsError: the region or the byte range reaches outside the tensor; it is named.
        UnsupportedError: an unknown encoding.
    """

    @lru_cache(maxsize=_REMEMBERED)
    def remembered(raw: bytes) -> Segment:
        return _parse(raw, limits)

    def read(raw: bytes, index: int) -> Segment:
        try:
            return remembered(raw) if len(raw) <= _LONGEST_REMEMBERED else _parse(raw, limits)
        except InvalidRequestError as error:
            where = f"segments[{index}]"
            subjects = [f"{where}.{field}" for field in error.subjects]
            raise InvalidRequestError(f"{where}: {error}", subjects=subjects) from None
        except WeightSyncError as error:
            text = f"segments[{index}]: {error}"
            raise type(error)(text, subjects=error.subjects) from None

    return read


def _parse(raw: bytes, limits: Limits) -> Segment:
    message = parse_message(types_pb2.Segment, raw)
    name = _name(message.name, limits)
    shape = _shape(message, limits)
    dtype = enum_from_proto(DType, message.dtype, "dtype")
    # Empty dimensions count as one: strides are computed as if they were.
    if math.prod(size or 1 for size in shape) * dtype.itemsize > _MAX_TENSOR_BYTES:
        raise InvalidRequestError(
            f"tensor {name!r} of shape {list(shape)} and type {dtype} has 2**63 bytes or more",
            subjects=["shape"],
        )
    segment = Segment(
        enum_from_proto(Target, message.target, "target"),
        name,
        dtype,
        shape,
        _region(message, shape),
        message.byte_offset,
        message.byte_length,
        _encoding(message.encoding),
        message.placed,
    )
    available = segment.region.numel * dtype.itemsize
    end = segment.byte_offset + segment.byte_length
    if end > available:
        raise OutOfBoundsError(
            f"bytes {segment.byte_offset} to {end} of region {segment.region} of tensor {name!r} "
            f"were sent, but it has {available}",
            subjects=[name],
        )
    return segment


def _name(name: str, limits: Limits) -> str:
    length = len(name.encode())
    if not 0 < length <= limits.max_name_bytes:
        raise InvalidRequestError(
            f"the name has {length} bytes; it must have 1 to {limits.max_name_bytes}",
            subjects=["name"],
        )
    return name


def _shape(message: types_pb2.Segment, limits: Limits) -> tuple[int, ...]:
    # Before the tuple is made: the list may be as long as the message.
    if len(message.shape) > limits.max_dims:
        raise InvalidRequestError(
            f"tensor {message.name!r} has {len(message.shape)} dimensions; at most "
            f"{limits.max_dims} are taken",
            subjects=["shape"],
        )
    return tuple(message.shape)


def _region(message: types_pb2.Segment, shape: tuple[int, ...]) -> Region:
    if not message.HasField("region"):
        return Region.whole(shape)
    sent = message.region
    if not len(sent.offsets) == len(sent.sizes) == len(shape):
        raise InvalidRequestError(
            f"the region has {len(sent.offsets)} offsets and {len(sent.sizes)} sizes; tensor "
            f"{message.name!r} of shape {list(shape)} needs {len(shape)} of each",
            subjects=["region"],
        )
    region = region_from_proto(sent)
    if not region.fits(shape):
        raise OutOfBoundsError(
            f"region {region} reaches outside tensor {message.name!r} of shape {list(shape)}",
            subjects=[message.name],
        )
    return region


def _encoding(value: int) -> Encoding:
    try:
        return enum_from_proto(Encoding, value, "encoding", default=Encoding.DENSE)
    except InvalidRequestError as error:
        raise UnsupportedError(str(error)) from None
