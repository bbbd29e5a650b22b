"""A worker that is running, as a source: what it holds goes to another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weightsync.core.errors import VersionChangedError
from weightsync.core.types import Segment, Target
from weightsync.wire.chunk import Chunk
from weightsync_client.shards import Shard
from weightsync_client.sources.bytes_array import BytesArray
from weightsync_client.worker import Worker


def peer_shards(peer: Worker, target: Target, version: str) -> Iterator[Shard]:
    """Yield what a worker holds of a version, in bounded pieces.

    Raises:
        VersionChangedError: it holds another one, or a commit came between.
        WeightSyncError: it can't be read.
    """
    for segment, data in _pieces(_of_version(peer, target, version)):
        size = segment.dtype.itemsize
        start = 0
        boxes = segment.region.runs(segment.byte_offset // size, len(data) // size)
        for box in boxes:
            nbytes = box.numel * size
            array = BytesArray.from_buffer(data[start : start + nbytes], segment.dtype, box.sizes)
            yield Shard(segment.name, array, segment.shape, box)
            start += nbytes


def _of_version(peer: Worker, target: Target, version: str) -> Iterator[Chunk]:
    for chunk in peer.read(target):
        if chunk.weight_version != version:
            raise VersionChangedError(
                f"{peer.address} went from version {version!r} to {chunk.weight_version!r} while"
                " it was read",
                worker=peer.address,
            )
        yield chunk


def _pieces(chunks: Iterable[Chunk]) -> Iterator[tuple[Segment, memoryview]]:
    """Yield segments with their bytes."""
    for chunk in chunks:
        start = 0
        for segment in chunk.segments:
            yield segment, chunk.payload[start : start + segment.byte_length]
            start += segment.byte_length
