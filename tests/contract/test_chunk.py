from __future__ import annotations

import array
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract import strategies
from weightsync.core.dtypes import DType
from weightsync.core.errors import (
    ChecksumMismatchError,
    InvalidRequestError,
    MalformedPayloadError,
    WeightSyncError,
)
from weightsync.core.regions import Region
from weightsync.core.types import ChecksumType, Limits, Segment, Target
from weightsync.v1 import types_pb2
from weightsync.v1.weight_sync_pb2 import ReadWeightsResponse, UpdateWeightsRequest
from weightsync.wire.checksum import checksum
from weightsync.wire.chunk import (
    parse_chunk,
    parse_read_chunk,
    serialize_chunk,
    serialize_read_chunk,
)

LIMITS = Limits()

WHOLE = Segment(Target.VERIFIER, "a", DType.BFLOAT16, (2,), Region.whole((2,)), 0, 4)
PART = Segment(
    Target.DRAFT,
    "b.w",
    DType.INT8,
    (300, 4),
    Region((299, 1), (1, 2)),
    byte_offset=1,
    byte_length=1,
)
SCALAR = Segment(Target.VERIFIER, "s", DType.FLOAT32, (), Region((), ()), 0, 4)

# WHOLE: target 1, name "a", dtype 11, shape [2], byte_length 4, encoding DENSE
WHOLE_HEX = "08 01  12 01 61  18 0b  22 01 02  38 04  40 01"
# PART: target 2, name "b.w", dtype 2, shape [300, 4], region {[299, 1], [1, 2]}, offset 1, length 1
PART_HEX = (
    "08 02  12 03 62 2e 77  18 02  22 03 ac 02 04"
    "  2a 09  0a 03 ab 02 01  12 02 01 02  30 01  38 01  40 01"
)
CHUNK_HEX = (
    "0a 02 73 31"  # session_id "s1"
    f"  12 0e {WHOLE_HEX}  12 1f {PART_HEX}"  # segments
    "  18 04"  # checksum_type CRC32C
    "  21 b8 15 d9 7e 00 00 00 00"  # checksum
    "  7a 05 01 02 03 04 ff"  # payload
)
READ_HEX = (
    f"0a 0e {WHOLE_HEX}"  # segments
    "  10 01"  # checksum_type NONE
    "  22 02 76 37"  # weight_version "v7"
    "  7a 04 01 02 03 04"  # payload
)


def as_message(segments: list[Segment], payload: bytes, kind: ChecksumType) -> UpdateWeightsRequest:
    """Build a chunk as a person with plain stubs does."""
    message = UpdateWeightsRequest(
        session_id="s1",
        checksum_type=types_pb2.ChecksumType.ValueType(kind.value),
        payload=payload,
    )
    for segment in segments:
        added = message.segments.add(
            target=types_pb2.Target.ValueType(segment.target.value),
            name=segment.name,
            dtype=types_pb2.DataType.ValueType(segment.dtype.value),
            shape=segment.shape,
            byte_offset=segment.byte_offset,
            byte_length=segment.byte_length,
            encoding=types_pb2.ENCODING_DENSE,
        )
        if segment.region.sizes != segment.shape:
            added.region.offsets.extend(segment.region.offsets)
            added.region.sizes.extend(segment.region.sizes)
    table = b"".join(segment.SerializeToString() for segment in message.segments)
    message.checksum = checksum(kind, [table + payload])
    return message


def test_the_bytes_of_a_chunk_are_those_written_down() -> None:
    """A chunk has the bytes of the contract, field by field, in both directions."""
    data = serialize_chunk("s1", [WHOLE, PART], [b"\1\2\3\4", b"\xff"], ChecksumType.CRC32C)
    assert data.hex() == bytes.fromhex(CHUNK_HEX).hex()
    chunk = parse_chunk(bytes.fromhex(CHUNK_HEX), LIMITS)
    assert chunk.session_id == "s1"
    assert chunk.segments == (WHOLE, PART)
    assert (chunk.checksum_type, chunk.checksum) == (ChecksumType.CRC32C, 0x7ED915B8)
    assert bytes(chunk.payload) == b"\1\2\3\4\xff"


def test_the_bytes_of_a_read_are_those_written_down() -> None:
    """A chunk of a read has the bytes of the contract, in both directions."""
    data = serialize_read_chunk([WHOLE], [b"\1\2\3\4"], ChecksumType.NONE, "v7")
    assert data.hex() == bytes.fromhex(READ_HEX).hex()
    chunk = parse_read_chunk(bytes.fromhex(READ_HEX))
    assert chunk.segments == (WHOLE,)
    assert (chunk.session_id, chunk.weight_version) == ("", "v7")
    assert bytes(chunk.payload) == b"\1\2\3\4"


@given(drawn=strategies.payloads(), kind=st.sampled_from(ChecksumType))
def test_chunks_are_ordinary_protobuf(
    drawn: tuple[list[Segment], list[bytes]], kind: ChecksumType
) -> None:
    """Plain stubs write the same bytes, and each side reads what the other wrote."""
    segments, buffers = drawn
    message = as_message(segments, b"".join(buffers), kind)
    data = serialize_chunk("s1", segments, buffers, kind)
    assert type(data) is bytes
    assert data == message.SerializeToString()
    assert UpdateWeightsRequest.FromString(data) == message
    chunk = parse_chunk(message.SerializeToString(), LIMITS)
    assert chunk.segments == tuple(segments)
    assert bytes(chunk.payload) == message.payload
    assert (chunk.checksum_type, chunk.checksum) == (kind, message.checksum)


@given(drawn=strategies.payloads(), kind=st.sampled_from(ChecksumType), version=strategies.texts)
def test_reads_are_ordinary_protobuf(
    drawn: tuple[list[Segment], list[bytes]], kind: ChecksumType, version: str
) -> None:
    """Plain stubs read and write the chunks of a read."""
    segments, buffers = drawn
    data = serialize_read_chunk(segments, buffers, kind, version)
    message = ReadWeightsResponse.FromString(data)
    assert message.SerializeToString() == data
    assert message.payload == b"".join(buffers)
    chunk = parse_read_chunk(data)
    assert (chunk.segments, chunk.weight_version) == (tuple(segments), version)
    assert bytes(chunk.payload) == message.payload


@given(drawn=strategies.payloads(), seed=st.randoms(use_true_random=False))
def test_fields_come_in_any_order(
    drawn: tuple[list[Segment], list[bytes]], seed: random.Random
) -> None:
    """A chunk whose fields come in another order is the same, the segments' order kept."""
    segments, buffers = drawn
    message = as_message(segments, b"".join(buffers), ChecksumType.XXH3_64)
    fields = [
        UpdateWeightsRequest(session_id=message.session_id),
        UpdateWeightsRequest(checksum_type=message.checksum_type),
        UpdateWeightsRequest(checksum=message.checksum),
        UpdateWeightsRequest(payload=message.payload),
    ]
    parts = [field.SerializeToString() for field in fields]
    places = sorted(seed.randrange(len(parts) + 1) for _ in message.segments)
    seed.shuffle(parts)
    for place, segment in reversed(list(zip(places, message.segments, strict=True))):
        parts.insert(place, UpdateWeightsRequest(segments=[segment]).SerializeToString())
    data = b"".join(parts)
    assert UpdateWeightsRequest.FromString(data) == message
    chunk = parse_chunk(data, LIMITS)
    assert chunk.segments == tuple(segments)
    assert bytes(chunk.payload) == message.payload
    assert chunk.session_id == "s1"


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param("28 07", id="varint"),
        pytest.param("31 01 02 03 04 05 06 07 08", id="fixed64"),
        pytest.param("3a 03 61 62 63", id="length-delimited"),
        pytest.param("45 01 02 03 04", id="fixed32"),
        pytest.param("f8 ff ff ff 0f 01", id="largest field number"),
    ],
)
def test_unknown_fields_are_skipped(unknown: str) -> None:
    """A newer client's field, before or behind the others, changes nothing."""
    known = bytes.fromhex(CHUNK_HEX)
    for data in (bytes.fromhex(unknown) + known, known + bytes.fromhex(unknown)):
        assert parse_chunk(data, LIMITS) == parse_chunk(known, LIMITS)


def test_unknown_fields_of_a_segment_are_skipped() -> None:
    """A newer client's field inside a segment changes nothing."""
    data = bytes.fromhex(READ_HEX.replace("0a 0e", "0a 11").replace("40 01", "40 01  a2 06 00", 1))
    assert parse_read_chunk(data).segments == (WHOLE,)


def test_a_repeated_small_field_has_its_last_value() -> None:
    """Of a small field that comes twice the last one counts, as protobuf says."""
    data = bytes.fromhex("0a 02 73 32  18 01") + bytes.fromhex(CHUNK_HEX)
    assert parse_chunk(data, LIMITS).session_id == "s1"


@pytest.mark.parametrize("second", ["7a 00", "7a 01 00"])
def test_a_second_payload_is_refused(second: str) -> None:
    """A message with two payloads is refused, even if one is empty: nobody can mean that."""
    with pytest.raises(MalformedPayloadError, match="two payloads"):
        parse_chunk(bytes.fromhex(CHUNK_HEX + second), LIMITS)


@pytest.mark.parametrize("payload", ["", "7a 00"])
def test_a_tensor_without_elements_needs_no_payload(payload: str) -> None:
    """B43: a zero-size tensor travels with an absent payload, or an empty one."""
    empty = Segment(Target.VERIFIER, "e", DType.FLOAT32, (0, 4), Region.whole((0, 4)), 0, 0)
    data = serialize_chunk("s1", [empty], [b""], ChecksumType.NONE) + bytes.fromhex(payload)
    chunk = parse_chunk(data, LIMITS)
    assert chunk.segments == (empty,)
    assert len(chunk.payload) == 0


def test_a_message_may_be_empty_but_for_its_session() -> None:
    """A first message that only names the session is taken."""
    chunk = parse_chunk(serialize_chunk("s1", [], [], ChecksumType.NONE), LIMITS)
    assert (chunk.session_id, chunk.segments, len(chunk.payload)) == ("s1", (), 0)


def test_the_payload_is_not_copied() -> None:
    """The parsed payload is memory of the received message, and read-only."""
    data = bytes.fromhex(CHUNK_HEX)
    payload = parse_chunk(data, LIMITS).payload
    assert payload.obj is data
    assert payload.readonly


def test_any_memory_is_a_buffer() -> None:
    """Memory of any shape, item type and size is written as its bytes, in one order of rows."""
    buffers: list[memoryview | bytearray | array.array[int]] = [
        np.arange(6, dtype="<i2").reshape(2, 3).data,
        np.zeros((0, 3), dtype="<f4").data,
        np.float32(1.5).data,
        array.array("B", b"xyz"),
        memoryview(b"....view....")[4:8],
        bytearray(b"ba"),
    ]
    expected = b"".join(memoryview(b).tobytes() for b in buffers)
    segment = Segment(
        Target.VERIFIER,
        "t",
        DType.UINT8,
        (len(expected),),
        Region((0,), (len(expected),)),
        0,
        len(expected),
    )
    for kind in ChecksumType:
        data = serialize_chunk("s1", [segment], buffers, kind)
        assert data == as_message([segment], expected, kind).SerializeToString()


def test_buffers_must_have_the_length_that_the_segments_say() -> None:
    """A sender is stopped before it sends a payload that its segments do not describe."""
    with pytest.raises(MalformedPayloadError, match="3 bytes"):
        serialize_chunk("s1", [WHOLE], [b"abc"], ChecksumType.NONE)


def test_an_absent_encoding_is_dense_and_an_absent_region_the_whole_tensor() -> None:
    """The shortest segment that bare stubs can write means what it should."""
    message = UpdateWeightsRequest(checksum_type=types_pb2.CHECKSUM_TYPE_NONE, payload=bytes(4))
    message.segments.add(
        target=types_pb2.TARGET_VERIFIER,
        name="a",
        dtype=types_pb2.DATA_TYPE_BFLOAT16,
        shape=[2],
        byte_length=4,
    )
    assert parse_chunk(message.SerializeToString(), LIMITS).segments == (WHOLE,)


def test_a_scalar_has_a_region_of_no_dimensions() -> None:
    """A 0-dimensional tensor is one element, with or without its empty region."""
    data = serialize_chunk("s1", [SCALAR], [bytes(4)], ChecksumType.NONE)
    message = UpdateWeightsRequest.FromString(data)
    message.segments[0].region.SetInParent()
    assert parse_chunk(data, LIMITS).segments == (SCALAR,)
    assert parse_chunk(message.SerializeToString(), LIMITS).segments == (SCALAR,)


def test_limits_hold_for_a_table_that_was_taken_before() -> None:
    """What one worker of a process takes, another one with lower limits refuses."""
    data = bytes.fromhex(CHUNK_HEX)
    parse_chunk(data, LIMITS)
    for limits in (Limits(max_name_bytes=2), Limits(max_dims=1), Limits(max_segments=1)):
        with pytest.raises(InvalidRequestError):
            parse_chunk(data, limits)


def test_control_bytes_in_a_payload_are_data() -> None:
    """B75: a payload may begin and end with bytes that look like tags of the message."""
    payload = bytes.fromhex("7a 0a 12 00") + bytes(8) + bytes.fromhex("0a 7a ff ff")
    segment = Segment(Target.VERIFIER, "t", DType.UINT8, (16,), Region((0,), (16,)), 0, 16)
    data = serialize_chunk("s1", [segment], [payload], ChecksumType.XXH3_64)
    assert bytes(parse_chunk(data, LIMITS).payload) == payload


@given(
    drawn=strategies.payloads(),
    kind=st.sampled_from([ChecksumType.XXH3_64, ChecksumType.CRC32C]),
    bit=st.integers(0),
)
def test_a_flipped_bit_of_the_table_is_noticed(
    drawn: tuple[list[Segment], list[bytes]], kind: ChecksumType, bit: int
) -> None:
    """A chunk whose offset, region or name changed on its way is not taken for what was sent."""
    segments, buffers = drawn
    data = bytearray(serialize_chunk("", segments, buffers, kind))
    end = len(data) - sum(map(len, buffers))
    data[bit // 8 % end] ^= 1 << bit % 8
    try:
        chunk = parse_chunk(bytes(data), LIMITS)
    except WeightSyncError:
        return
    if (chunk.segments, chunk.checksum_type) != (tuple(segments), kind):
        with pytest.raises(ChecksumMismatchError):
            chunk.check()
