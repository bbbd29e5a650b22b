"""Messages out of bytes, and single values in both directions: enums, times, regions, targets."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from weightsync.core.errors import InvalidRequestError, MalformedPayloadError
from weightsync.core.regions import Region
from weightsync.core.types import Target
from weightsync.v1 import types_pb2

E = TypeVar("E", bound=enum.Enum)
M = TypeVar("M", bound=Message)

_NANOS = 10**9


def parse_message(kind: type[M], data: bytes) -> M:
    """Return the message of some bytes.

    Raises:
        MalformedPayloadError: they are no such message.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedPayloadError(
            f"{len(data)} bytes are no {kind.__name__} message: {error}"
        ) from None


def enum_from_proto(kind: type[E], value: int, field: str, *, default: E | None = None) -> E:
    """Return the core's word for an enum's number.

    Args:
        kind: The enum of the core.
        value: The number on the wire.
        field: Path of the field, for the error.
        default: What UNSPECIFIED stands for; None where the contract does not allow it.

    Raises:
        InvalidRequestError: no such value.
    """
    if value == 0 and default is not None:
        return default
    try:
        return kind(value)
    except ValueError:
        words = ", ".join(f"{word.name} = {word.value}" for word in kind)
        raise InvalidRequestError(
            f"{field} is {value or 'not set'}; it must be one of {words}", subjects=[field]
        ) from None


def targets_from_proto(values: Iterable[int], field: str) -> frozenset[Target]:
    """Return the targets of a repeated field; empty if it is.

    Raises:
        InvalidRequestError: an unknown or unspecified one.
    """
    return frozenset(
        enum_from_proto(Target, value, f"{field}[{index}]") for index, value in enumerate(values)
    )


def targets_to_proto(targets: Iterable[Target]) -> list[types_pb2.Target.ValueType]:
    """Return targets in the order of the contract's numbers."""
    return [
        types_pb2.Target.ValueType(value) for value in sorted(target.value for target in targets)
    ]


def region_from_proto(message: types_pb2.Region) -> Region:
    """Return a region as it was sent: nothing is checked."""
    return Region(tuple(message.offsets), tuple(message.sizes))


def region_to_proto(region: Region) -> types_pb2.Region:
    """Return a region's message."""
    return types_pb2.Region(offsets=region.offsets, sizes=region.sizes)


def time_from_proto(message: Timestamp) -> float:
    """Return Unix seconds; an absent time gives 0."""
    # Integers divide to the nearest float: what was a float comes back as the same one.
    return (message.seconds * _NANOS + message.nanos) / _NANOS


def time_to_proto(seconds: float) -> Timestamp:
    """Return a timestamp of Unix seconds, to the nanosecond."""
    whole, nanos = _split(seconds)
    return Timestamp(seconds=whole, nanos=nanos)


def duration_from_proto(message: Duration) -> float:
    """Return a duration in seconds."""
    return (message.seconds * _NANOS + message.nanos) / _NANOS


def duration_to_proto(seconds: float) -> Duration:
    """Return a duration of seconds that are not negative, to the nanosecond."""
    whole, nanos = _split(seconds)
    return Duration(seconds=whole, nanos=nanos)


def _split(seconds: float) -> tuple[int, int]:
    # Whole seconds first: a Unix time in nanoseconds has more digits than a float.
    fraction, whole = math.modf(seconds)
    return divmod(int(whole) * _NANOS + round(fraction * _NANOS), _NANOS)
