"""Cuts boxes of tensors into messages: few and full, whatever the sizes of the tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightsync.core.errors import InvalidRequestError
from weightsync.core.regions import Region
from weightsync.core.types import ChecksumType, Segment, TensorKey
from weightsync.wire.chunk import serialize_chunk
from weightsync.wire.segment import serialize_segment
from weightsync_client.shards import Array

HEADER_BYTES = 60 << 10
"""Most bytes of segment headers in one message; workers leave 64 KiB beside the payload."""


@dataclass(frozen=True, slots=True)
class Message:
    """A serialized chunk, without session id, so that it fits every worker.

    Attributes:
        data: The `UpdateWeightsRequest`.
        segments: What its payload holds.
        payload_bytes: Length of the payload.
        placed_bytes: Bytes that lie in the worker's arena already.
    """

    data: bytes
    segments: tuple[Segment, ...]
    payload_bytes: int
    placed_bytes: int = 0


class Chunker:
    """Fills messages with segments and hands each on when it is full.

    Tensors are cut on element boundaries, in row-major order; what is small travels together.
    """

    def __init__(
        self,
        emit: Callable[[Message], None],
        *,
        max_payload_bytes: int,
        max_segments: int,
        checksum: ChecksumType,
    ) -> None:
        """Start empty.

        Args:
            emit: Takes each message.
            max_payload_bytes: Most payload per message; at least 16, the largest element.
            max_segments: Most segments per message.
            checksum: How payloads are protected.
        """
        if max_payload_bytes < 16 or max_segments < 1:  # noqa: PLR2004 - one complex128
            raise InvalidRequestError(
                "a message must hold at least 16 bytes and one segment", subjects=["chunk_bytes"]
            )
        self._emit = emit
        self._max_payload = max_payload_bytes
        self._max_segments = max_segments
        self._checksum = checksum
        self._reset()

    def _reset(self) -> None:
        self._segments: list[Segment] = []
        self._buffers: list[memoryview | bytes] = []
        self._owned = 0
        self._payload = 0
        self._header = 0

    def add(
        self, key: TensorKey, shape: tuple[int, ...], box: Region, array: Array, origin: Region
    ) -> None:
        """Send a box of a tensor; see `Carrier.add`."""
        itemsize = array.dtype.itemsize
        local = box.relative_to(origin)
        start = 0
        while start < box.numel:
            room = (self._max_payload - self._payload) // itemsize
            count = min(room, box.numel - start)
            segment = Segment(
                target=key.target,
                name=key.name,
                dtype=array.dtype,
                shape=shape,
                region=box,
                byte_offset=start * itemsize,
                byte_length=count * itemsize,
            )
            if room == 0 or self._crowded(segment):
                self.flush()
                continue
            self._segments.append(segment)
            self._buffers.extend(array.read(run) for run in local.runs(start, count))
            self._payload += segment.byte_length
            self._header += _header_bytes(segment)
            start += count
        if self._payload == self._max_payload:
            self.flush()

    def _crowded(self, segment: Segment) -> bool:
        return bool(self._segments) and (
            len(self._segments) >= self._max_segments
            or self._header + _header_bytes(segment) > HEADER_BYTES
        )

    def own(self) -> None:
        """Copy what waits in the unfinished message, so that its arrays may change."""
        for index in range(self._owned, len(self._buffers)):
            self._buffers[index] = bytes(self._buffers[index])
        self._owned = len(self._buffers)

    def flush(self) -> None:
        """Hand on the unfinished message, if there is one."""
        if not self._segments:
            return
        segments = tuple(self._segments)
        data = serialize_chunk("", segments, self._buffers, self._checksum)
        message = Message(data, segments, self._payload)
        self._reset()
        self._emit(message)


def _header_bytes(segment: Segment) -> int:
    # Serializing is cached: the message is put together from the same bytes.
    return len(serialize_segment(segment)) + 8
