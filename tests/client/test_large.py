from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weightsync_client import Fleet, Shard  # noqa: E402
from weightsync_client.chunker import Chunker, Message  # noqa: E402
from weightsync_client.sources import shards  # noqa: E402

from weightsync.core.dtypes import DType  # noqa: E402
from weightsync.core.regions import Region  # noqa: E402
from weightsync.core.types import (  # noqa: E402
    ChecksumType,
    Limits,
    Scope,
    Segment,
    Target,
    TensorKey,
)
from weightsync.server.serve import serve  # noqa: E402
from weightsync.wire.chunk import parse_chunk  # noqa: E402

GIB = 1 << 30


class Zeros:
    """An array whose bytes exist only while they are read."""

    dtype = DType.UINT8

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def read(self, box: Region) -> memoryview:
        """Return the bytes of a box."""
        return memoryview(bytes(box.numel))

    def cast(self, dtype: DType) -> Zeros:
        """Return itself: no other type is asked for."""
        assert dtype is self.dtype
        return self


def test_a_tensor_beyond_2_gib_is_cut_before_protobuf_sees_it() -> None:
    """B77: each message keeps the default limit, and together they are the tensor, once."""
    array = Zeros(2 * GIB + 5)
    whole = Region.whole(array.shape)
    limits = Limits()
    segments: list[Segment] = []

    def take(message: Message) -> None:
        assert len(message.data) <= limits.max_message_bytes
        segments.extend(message.segments)
        # Numbers beyond 31 bits come through as they were.
        assert parse_chunk(message.data, limits).segments == message.segments

    chunker = Chunker(
        take,
        max_payload_bytes=limits.max_payload_bytes,
        max_segments=limits.max_segments,
        checksum=ChecksumType.NONE,
    )
    chunker.add(TensorKey(Target.VERIFIER, "big"), array.shape, whole, array, whole)
    chunker.flush()
    end = 0
    for segment in segments:
        assert segment.byte_offset == end
        end += segment.byte_length
    assert end == 2 * GIB + 5


def test_places_beyond_4_gib_are_met() -> None:
    """B77: bytes for the end of a tensor of 5 GiB land there, and nowhere in its first 4."""
    model = torch.nn.Module()
    # Pages that nobody touches take no memory.
    model.register_buffer("big", torch.empty(5 * GIB, dtype=torch.uint8))
    low = 5 * GIB - 16 - (1 << 32)
    model.big[low : low + 16] = 1
    (rows,) = shards({"big": torch.full((16,), 7, dtype=torch.uint8)})
    with serve(model) as server, Fleet([server.address]) as fleet:
        with fleet.update(version="v1", scope=Scope.PARTIAL) as session:
            session.push([Shard("big", rows.array, (5 * GIB,), Region((5 * GIB - 16,), (16,)))])
        assert session.report.sent_bytes == 16
    assert bytes(model.big[-16:].tolist()) == b"\7" * 16
    assert bytes(model.big[low : low + 16].tolist()) == b"\1" * 16
