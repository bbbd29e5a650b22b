from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.contract import strategies
from weightsync.core.dtypes import DType
from weightsync.core.errors import (
    InvalidRequestError,
    MalformedPayloadError,
    OutOfBoundsError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.core.regions import Region
from weightsync.core.types import ChecksumType, Limits, Segment, Target
from weightsync.v1 import types_pb2
from weightsync.v1.weight_sync_pb2 import UpdateWeightsRequest
from weightsync.wire.chunk import parse_chunk, parse_read_chunk, serialize_chunk
from weightsync.wire.tags import write_varint

LIMITS = Limits()

SEGMENT = Segment(
    Target.VERIFIER, "fc.weight", DType.FLOAT32, (4, 4), Region((1, 0), (2, 4)), 8, 12
)
GOOD = serialize_chunk("s1", [SEGMENT], [bytes(range(12))], ChecksumType.XXH3_64)

Edit = Callable[[types_pb2.Segment], Any]


def edited(edit: Edit) -> bytes:
    """Return a chunk whose one segment was changed."""
    message = UpdateWeightsRequest.FromString(GOOD)
    edit(message.segments[0])
    return message.SerializeToString()


def whole(message: types_pb2.Segment, shape: list[int], byte_length: int = 12) -> None:
    """Make a segment one of a whole tensor."""
    message.ClearField("region")
    message.shape[:] = shape
    message.byte_offset, message.byte_length = 0, byte_length


@pytest.mark.parametrize("end", range(len(GOOD)))
def test_a_message_cut_at_any_byte_is_refused(end: int) -> None:
    """No beginning of a message is taken for a whole one."""
    with pytest.raises(WeightSyncError):
        parse_chunk(GOOD[:end], LIMITS)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param("0a", id="tag without length"),
        pytest.param("80", id="unfinished tag"),
        pytest.param("00 00", id="field number 0"),
        pytest.param("80 80 80 80 10 00", id="field number over 29 bits"),
        pytest.param("18 ff ff ff ff ff ff ff ff ff ff 01", id="varint of 11 bytes"),
        pytest.param("18 80 80 80 80 80 80 80 80 80 80 00", id="padded varint of 11 bytes"),
        pytest.param("18 ff ff ff ff ff ff ff ff ff 02", id="varint over 64 bits"),
        pytest.param("ff ff ff ff ff ff ff ff ff ff ff 01", id="tag of 11 bytes"),
        pytest.param("13 14", id="group"),
        pytest.param("14", id="end of a group that never began"),
        pytest.param("16 00", id="wire type 6"),
        pytest.param("17 00", id="wire type 7"),
        pytest.param("7a 05 01 02", id="length beyond the buffer"),
        pytest.param("7a ff ff ff ff ff ff ff ff 7f", id="length 2**63 - 1"),
        pytest.param("7a ff ff ff ff ff ff ff ff ff 01", id="length -1"),
        pytest.param("12 ff ff ff ff 0f", id="segment of 4 GiB"),
        pytest.param("21 00 00", id="cut fixed64"),
        pytest.param("45 00", id="cut fixed32"),
        pytest.param("10 07", id="segments as a number"),
        pytest.param("78 07", id="payload as a number"),
        pytest.param("0a 02 c3 28", id="session_id that is not UTF-8"),
        pytest.param("12 04 12 02 c3 28", id="name that is not UTF-8"),
        pytest.param("12 02 08 80", id="segment that ends in a varint"),
        pytest.param("12 02 22 05", id="shape longer than its segment"),
        pytest.param("12 01 13", id="open group in a segment"),
    ],
)
@pytest.mark.parametrize("before", [b"", GOOD], ids=["alone", "behind a chunk"])
def test_what_is_no_message_is_refused(raw: str, before: bytes) -> None:
    """Bytes that protobuf does not allow, or this contract does not use, are refused as such."""
    with pytest.raises(MalformedPayloadError):
        parse_chunk(before + bytes.fromhex(raw), LIMITS)


def refused_fields(data: bytes) -> tuple[str, ...]:
    """Return the field paths for which a chunk is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_chunk(data, LIMITS)
    return caught.value.subjects


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        pytest.param(lambda s: s.ClearField("target"), "target", id="no target"),
        pytest.param(lambda s: setattr(s, "target", 9), "target", id="unknown target"),
        pytest.param(lambda s: setattr(s, "target", -1), "target", id="negative target"),
        pytest.param(lambda s: s.ClearField("dtype"), "dtype", id="no dtype"),
        pytest.param(lambda s: setattr(s, "dtype", 99), "dtype", id="unknown dtype"),
        pytest.param(lambda s: s.ClearField("name"), "name", id="no name"),
        pytest.param(lambda s: setattr(s, "name", "é" * 513), "name", id="name over the limit"),
        pytest.param(lambda s: setattr(s, "name", "x" * 2**20), "name", id="name of 1 MB"),
        pytest.param(lambda s: whole(s, [1] * 17), "shape", id="17 dimensions"),
        pytest.param(lambda s: whole(s, [0] * 10**6), "shape", id="a million dimensions"),
        pytest.param(lambda s: whole(s, [2**63]), "shape", id="2**63 elements"),
        pytest.param(lambda s: whole(s, [2**64 - 1]), "shape", id="2**64 - 1 elements"),
        pytest.param(lambda s: whole(s, [2**32, 2**32]), "shape", id="product of 2**64"),
        pytest.param(lambda s: whole(s, [2**32, 2**29 + 1]), "shape", id="wraps to 16 bytes"),
        pytest.param(lambda s: whole(s, [2**61]), "shape", id="2**63 bytes"),
        pytest.param(lambda s: whole(s, [0, 2**63], 0), "shape", id="empty, strides of 2**63"),
        pytest.param(lambda s: s.region.offsets.append(0), "region", id="offsets too long"),
        pytest.param(lambda s: s.region.sizes.pop(), "region", id="sizes too short"),
        pytest.param(lambda s: s.region.Clear(), "region", id="region without dimensions"),
        pytest.param(lambda s: s.region.sizes.extend([1] * 10**6), "region", id="long region"),
    ],
)
def test_a_bad_field_is_named(edit: Edit, field: str) -> None:
    """A segment with a missing, unknown or oversized field is refused by the path of the field."""
    assert refused_fields(edited(edit)) == (f"segments[0].{field}",)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda s: s.region.offsets.__setitem__(0, 3), id="region past the end"),
        pytest.param(lambda s: s.region.offsets.__setitem__(0, 2**64 - 1), id="offset of -1"),
        pytest.param(lambda s: s.region.sizes.__setitem__(1, 2**64 - 1), id="size of -1"),
        pytest.param(lambda s: s.region.sizes.__setitem__(1, 5), id="region too wide"),
        pytest.param(lambda s: setattr(s, "byte_offset", 21), id="bytes past the region"),
        pytest.param(lambda s: setattr(s, "byte_offset", 2**64 - 4), id="byte offset that wraps"),
        pytest.param(lambda s: setattr(s, "byte_length", 2**64 - 1), id="byte length of -1"),
        pytest.param(lambda s: s.region.sizes.__setitem__(0, 0), id="bytes of an empty region"),
        pytest.param(lambda s: whole(s, [0]), id="bytes of an empty tensor"),
        pytest.param(lambda s: whole(s, []), id="bytes past a scalar"),
    ],
)
def test_what_lies_outside_a_tensor_is_refused(edit: Edit) -> None:
    """A region outside its tensor, or bytes outside their region, are refused by tensor name."""
    with pytest.raises(OutOfBoundsError) as caught:
        parse_chunk(edited(edit), LIMITS)
    assert caught.value.subjects == ("fc.weight",)
    assert "fc.weight" in str(caught.value)


@pytest.mark.parametrize("length", [0, 11, 13, 2**20])
def test_a_payload_of_another_length_is_refused(length: int) -> None:
    """A payload shorter or longer than its segments say is refused."""
    message = UpdateWeightsRequest.FromString(GOOD)
    message.payload = bytes(length)
    with pytest.raises(MalformedPayloadError, match=f"{length} bytes"):
        parse_chunk(message.SerializeToString(), LIMITS)


def test_an_unknown_encoding_is_not_supported() -> None:
    """A segment in an encoding of a later version is refused as such."""
    with pytest.raises(UnsupportedError, match="encoding"):
        parse_chunk(edited(lambda s: setattr(s, "encoding", 2)), LIMITS)


@pytest.mark.parametrize("value", [0, 9, -1, 2**31 - 1])
def test_an_unknown_checksum_type_is_refused(value: int) -> None:
    """A sender without a checksum has to say so; a checksum nobody knows is no checksum."""
    message = UpdateWeightsRequest.FromString(GOOD)
    message.checksum_type = types_pb2.ChecksumType.ValueType(value)
    assert refused_fields(message.SerializeToString()) == ("checksum_type",)


def test_the_segment_at_fault_is_named_by_its_index() -> None:
    """Of many segments the bad one is named, also when an equal one was met before."""
    message = UpdateWeightsRequest.FromString(GOOD)
    bad = message.segments.add()
    bad.CopyFrom(message.segments[0])
    bad.ClearField("dtype")
    assert refused_fields(message.SerializeToString()) == ("segments[1].dtype",)
    message.segments.insert(1, message.segments[0])
    assert refused_fields(message.SerializeToString()) == ("segments[2].dtype",)


def test_more_segments_than_the_limit_are_refused_before_they_are_parsed() -> None:
    """A message of 100,000 segments is refused by their number, whatever is in them."""
    data = b"\x12\x01\xff" * 100_000
    assert refused_fields(data) == ("segments",)


def test_as_many_segments_as_the_limit_are_taken() -> None:
    """The limit itself is allowed."""
    empty = Segment(Target.DRAFT, "e", DType.BOOL, (0,), Region((0,), (0,)), 0, 0)
    table = [empty] * LIMITS.max_segments
    data = serialize_chunk("s1", table, [], ChecksumType.NONE)
    assert len(parse_chunk(data, LIMITS).segments) == LIMITS.max_segments


def test_error_texts_stay_short() -> None:
    """What a hostile sender puts into a message does not come back in full."""
    hostile: list[Edit] = [
        lambda s: setattr(s, "name", "x" * 2**20),
        lambda s: whole(s, [0] * 10**6),
        lambda s: s.region.sizes.extend([1] * 10**6),
    ]
    for edit in hostile:
        with pytest.raises(WeightSyncError) as caught:
            parse_chunk(edited(edit), LIMITS)
        assert len(str(caught.value)) < 2000


def taken_or_refused(data: bytes) -> None:
    """Parse bytes in both ways; only errors of this project may come out."""
    for parse in (lambda raw: parse_chunk(raw, LIMITS), parse_read_chunk):
        try:
            chunk = parse(data)
        except WeightSyncError:
            continue
        assert sum(s.byte_length for s in chunk.segments) == len(chunk.payload)
        for segment in chunk.segments:
            assert segment.region.fits(segment.shape)
            available = segment.region.numel * segment.dtype.itemsize
            assert segment.byte_offset + segment.byte_length <= available


@given(st.binary(max_size=200))
@example(b"")
def test_random_bytes_are_taken_or_refused(data: bytes) -> None:
    """Whatever arrives, the answer is a chunk that is right in itself, or an error of ours."""
    taken_or_refused(data)


varints = st.integers(0, 2**64 - 1).map(write_varint)
contents = st.one_of(st.binary(max_size=12), st.lists(varints, max_size=4).map(b"".join))
fields = st.tuples(st.integers(0, 16), st.integers(0, 7), varints, contents).map(
    lambda f: (
        write_varint(f[0] << 3 | f[1])
        + {0: f[2], 1: f[3][:8], 2: write_varint(len(f[3])) + f[3], 5: f[3][:4]}.get(f[1], b"")
    )
)


@given(st.lists(fields, max_size=8), st.lists(fields, max_size=8))
def test_random_fields_are_taken_or_refused(outer: list[bytes], inner: list[bytes]) -> None:
    """Messages of random fields, inside and around a segment, are taken or refused cleanly."""
    segment = b"".join(inner)
    taken_or_refused(b"\x12" + write_varint(len(segment)) + segment + b"".join(outer))
    taken_or_refused(b"".join(outer))


@given(strategies.payloads(), st.randoms(use_true_random=False), st.integers(1, 4))
def test_mutated_messages_are_taken_or_refused(
    drawn: tuple[list[Segment], list[bytes]], chance: random.Random, changes: int
) -> None:
    """A valid message with flipped, lost, doubled or inserted bytes is taken or refused cleanly."""
    segments, buffers = drawn
    data = bytearray(serialize_chunk("s1", segments, buffers, ChecksumType.XXH3_64))
    for _ in range(changes):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at : at + chance.randrange(1, 5)]
            case 2:
                data[at:at] = data[max(0, at - chance.randrange(1, 9)) : at]
            case _:
                data[at:at] = chance.randbytes(chance.randrange(1, 12))
    taken_or_refused(bytes(data))
