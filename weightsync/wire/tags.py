"""The outermost level of a protobuf message, without a copy of what is in it."""

from __future__ import annotations

from collections.abc import Iterator

from weightsync.core.errors import MalformedPayloadError

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5

_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}

_LONGEST_VARINT = 10
_MORE = 0x80  # Set in every byte of a varint but the last.


def write_varint(value: int) -> bytes:
    """Return an unsigned integer as a varint."""
    out = bytearray()
    while value >= _MORE:
        out.append(value % _MORE | _MORE)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position behind it.

    Raises:
        MalformedPayloadError: it is cut off, longer than ten bytes or larger than 64 bits.
    """
    # Nearly all have one byte.
    if position < len(data) and data[position] < _MORE:
        return data[position], position + 1
    value = 0
    for index, byte in enumerate(data[position : position + _LONGEST_VARINT]):
        value |= byte % _MORE << 7 * index
        if byte < _MORE:
            if value >> 64:
                break
            return value, position + index + 1
    raise MalformedPayloadError(
        f"the message has no whole varint at byte {position} of {len(data)}; send it again"
    )


def fields(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Walk over the fields of a message.

    Yields:
        Field number, wire type, position of the tag, start and end of the content.

    Raises:
        MalformedPayloadError: no protobuf message, or cut off.
    """
    position, end = 0, len(data)
    while position < end:
        begin = position
        tag, position = read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise MalformedPayloadError(f"byte {begin} of the message has field number {number}")
        if wire_type == LENGTH_DELIMITED:
            length, start = read_varint(data, position)
            position = start + length
        elif wire_type == VARINT:
            start = position
            _, position = read_varint(data, position)
        elif wire_type in _FIXED_BYTES:
            start = position
            position += _FIXED_BYTES[wire_type]
        else:
            raise MalformedPayloadError(
                f"byte {begin} of the message has wire type {wire_type}, which is not used here"
            )
        if position > end:
            raise MalformedPayloadError(
                f"the message ends within field {number}: it has {end} bytes, "
                f"the field would end at {position}; send it whole"
            )
        yield number, wire_type, begin, start, position
