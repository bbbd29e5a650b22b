"""Chunks: a table of segments and one payload, which is neither parsed nor built by protobuf.

The bytes are those of ordinary protobuf messages, so that plain stubs work at the other end. What
protobuf would do to a payload of megabytes (copies in and out of a message) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from weightsync.core.errors import InvalidRequestError, MalformedPayloadError
from weightsync.core.types import ChecksumType, Limits, Segment
from weightsync.v1.types_pb2 import ChecksumType as ChecksumTypeProto
from weightsync.v1.weight_sync_pb2 import ReadWeightsResponse, UpdateWeightsRequest
from weightsync.wire.checksum import check, checksum
from weightsync.wire.convert import enum_from_proto, parse_message
from weightsync.wire.segment import segment_reader, serialize_segment
from weightsync.wire.tags import LENGTH_DELIMITED, fields, write_varint

if TYPE_CHECKING:
    from typing_extensions import Buffer

M = TypeVar("M", UpdateWeightsRequest, ReadWeightsResponse)

# A worker is trusted by those who read from it, and its limits may be larger than the defaults.
_READER_LIMITS = Limits(max_name_bytes=1 << 31, max_segments=1 << 31, max_dims=1 << 31)

_PAYLOAD = UpdateWeightsRequest.PAYLOAD_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message's worth of bytes, checked in itself but not yet against a worker's tensors.

    Attributes:
        session_id: The session; empty where the stream has named it before, and in reads.
        segments: What the payload holds, or the arena already; the lengths of those that are not
            placed add up to the payload's.
        checksum_type: How the chunk is protected; see `check`.
        checksum: The checksum that the sender computed.
        payload: The bytes, read-only, within the message as it was received.
        weight_version: What the target holds; in reads only.
        table: The bytes of the segments as they were received, one after the other.
    """

    session_id: str
    segments: tuple[Segment, ...]
    checksum_type: ChecksumType
    checksum: int
    payload: memoryview
    weight_version: str = ""
    table: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes that it brings, in the payload or beside it."""
        placed = sum(segment.byte_length for segment in self.segments if segment.placed)
        return len(self.payload) + placed

    def check(self) -> None:
        """Compare the segments and the payload with the checksum; parsing has not done so.

        Raises:
            ChecksumMismatchError: the chunk is not what was sent.
        """
        check(self.checksum_type, self.checksum, (self.table, self.payload))


def parse_chunk(data: bytes, limits: Limits) -> Chunk:
    """Parse an `UpdateWeightsRequest`.

    Every count, length and size is checked before anything is made of it.

    Raises:
        MalformedPayloadError: no message, cut off, or its payload has not the length that its
            segments say.
        InvalidRequestError: a field is missing, unknown or over a limit; subjects name it.
        OutOfBoundsError: a region or byte range reaches outside its tensor; subjects name it.
        UnsupportedError: an encoding that this version does not know.
    """
    header, table, segments, payload = _take_apart(
        data, UpdateWeightsRequest.SEGMENTS_FIELD_NUMBER, limits
    )
    message = parse_message(UpdateWeightsRequest, header)
    return Chunk(
        message.session_id,
        segments,
        enum_from_proto(ChecksumType, message.checksum_type, "checksum_type"),
        message.checksum,
        payload,
        table=table,
    )


def parse_read_chunk(data: bytes) -> Chunk:
    """Parse a `ReadWeightsResponse`.

    Raises:
        WeightSyncError: as `parse_chunk`, but a worker's answer has no limits of size.
    """
    header, table, segments, payload = _take_apart(
        data, ReadWeightsResponse.SEGMENTS_FIELD_NUMBER, _READER_LIMITS
    )
    message = parse_message(ReadWeightsResponse, header)
    return Chunk(
        "",
        segments,
        enum_from_proto(ChecksumType, message.checksum_type, "checksum_type"),
        message.checksum,
        payload,
        message.weight_version,
        table,
    )


def serialize_chunk(
    session_id: str,
    segments: Sequence[Segment],
    buffers: Sequence[Buffer],
    checksum_type: ChecksumType,
) -> bytes:
    """Return an `UpdateWeightsRequest`, byte for byte as protobuf would write it.

    Args:
        session_id: The session; may be empty if an earlier message of the stream names it.
        segments: What the payload holds.
        buffers: The payload in pieces, in order; C-contiguous memory of any shape and item type.
        checksum_type: How to protect it.

    Raises:
        MalformedPayloadError: the buffers have not the length that the segments say.
    """
    table = [serialize_segment(segment) for segment in segments]
    behind = UpdateWeightsRequest(
        checksum_type=ChecksumTypeProto.ValueType(checksum_type.value),
        checksum=checksum(checksum_type, (b"".join(table), *buffers)),
    )
    _check_length(segments, _length(buffers))
    return _put_together(UpdateWeightsRequest(session_id=session_id), table, behind, buffers)


def serialize_read_chunk(
    segments: Sequence[Segment],
    buffers: Sequence[Buffer],
    checksum_type: ChecksumType,
    weight_version: str,
) -> bytes:
    """Return a `ReadWeightsResponse`, byte for byte as protobuf would write it.

    Args and errors are those of `serialize_chunk`; `weight_version` is what the target holds.
    """
    table = [serialize_segment(segment) for segment in segments]
    behind = ReadWeightsResponse(
        checksum_type=ChecksumTypeProto.ValueType(checksum_type.value),
        checksum=checksum(checksum_type, (b"".join(table), *buffers)),
        weight_version=weight_version,
    )
    _check_length(segments, _length(buffers))
    return _put_together(ReadWeightsResponse(), table, behind, buffers)


def _put_together(before: M, table: Sequence[bytes], behind: M, buffers: Sequence[Buffer]) -> bytes:
    """Join the fields in the order of their numbers, as protobuf does."""
    parts: list[Buffer] = [before.SerializeToString()]
    tag = _tag(before.SEGMENTS_FIELD_NUMBER)
    for segment in table:
        parts += (tag, write_varint(len(segment)), segment)
    parts.append(behind.SerializeToString())
    length = _length(buffers)
    if length:  # Protobuf leaves an empty field out.
        parts += (_tag(_PAYLOAD), write_varint(length), *buffers)
    return b"".join(parts)


def _length(buffers: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def _tag(number: int) -> bytes:
    return write_varint(number << 3 | LENGTH_DELIMITED)


def _take_apart(
    data: bytes, segments_number: int, limits: Limits
) -> tuple[bytes, bytes, tuple[Segment, ...], memoryview]:
    """Split a message into its small fields, its segments (raw and read) and its payload."""
    rest = bytearray()
    found: list[bytes] = []
    payload: memoryview | None = None
    for number, wire_type, begin, start, end in fields(data):
        if number not in (segments_number, _PAYLOAD):
            rest += data[begin:end]
            continue
        if wire_type != LENGTH_DELIMITED:
            raise MalformedPayloadError(
                f"field {number} of the message has wire type {wire_type} instead of 2"
            )
        if number == segments_number:
            if len(found) == limits.max_segments:
                raise InvalidRequestError(
                    f"the message has more than {limits.max_segments} segments; send several",
                    subjects=["segments"],
                )
            found.append(data[start:end])
        elif payload is None:
            payload = memoryview(data)[start:end]
        else:
            raise MalformedPayloadError("the message has two payloads; send it with one")
    payload = memoryview(b"") if payload is None else payload
    read = segment_reader(limits)
    segments = tuple(read(raw, index) for index, raw in enumerate(found))
    _check_length(segments, len(payload))
    return bytes(rest), b"".join(found), segments, payload


def _check_length(segments: Sequence[Segment], length: int) -> None:
    named = sum(segment.byte_length for segment in segments if not segment.placed)
    if named != length:
        raise MalformedPayloadError(
            f"the payload has {length} bytes, but its {len(segments)} segments name {named}; "
            "their lengths must add up to the payload's"
        )
