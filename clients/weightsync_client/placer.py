"""Puts boxes of tensors straight into a worker's arena; messages only say what lies there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from weightsync.core.regions import Region
from weightsync.core.types import ChecksumType, Segment, TensorKey
from weightsync.core.views import TensorPlacement
from weightsync.wire.chunk import serialize_chunk
from weightsync.wire.segment import serialize_segment
from weightsync_client.arenas import MappedArena, elements
from weightsync_client.chunker import HEADER_BYTES, Chunker, Message
from weightsync_client.shards import Array

COPYING_THREADS = 2
"""numpy lets go of the interpreter while it copies; two threads reach what memory gives."""

PIECE_BYTES = 8 << 20
"""Size of the pieces that the threads copy."""

TOLD_BYTES = 256 << 20
"""After so many bytes the worker is told, so that the session's lease is renewed."""


class Placer:
    """Copies boxes into one worker's arena.

    What can't be placed goes inline, by a chunker: other element types, and bools.
    """

    def __init__(
        self,
        emit: Callable[[Message], None],
        arena: MappedArena,
        inline: Chunker,
        *,
        max_segments: int,
    ) -> None:
        """Start with nothing placed.

        Args:
            emit: Takes each message.
            arena: The worker's.
            inline: For what can't be placed.
            max_segments: Most segments per message.
        """
        self._emit = emit
        self._arena = arena
        self._inline = inline
        self._max_segments = max_segments
        self._threads = ThreadPoolExecutor(COPYING_THREADS, "weightsync-placer")
        self._reset()

    def _reset(self) -> None:
        self._segments: list[Segment] = []
        self._header = 0
        self._placed = 0

    def add(
        self, key: TensorKey, shape: tuple[int, ...], box: Region, array: Array, origin: Region
    ) -> None:
        """Send a box of a tensor; see `Carrier.add`."""
        placement = self._arena.find(key)
        if placement is None or placement.dtype is not array.dtype:
            self._inline.add(key, shape, box, array, origin)
            return
        self._copy(placement, box, array, origin)
        length = box.numel * array.dtype.itemsize
        self._note(
            Segment(key.target, key.name, array.dtype, shape, box, 0, length, placed=True), length
        )

    def _copy(self, placement: TensorPlacement, box: Region, array: Array, origin: Region) -> None:
        step = max(1, PIECE_BYTES // array.dtype.itemsize)
        if box.numel <= step:
            _copy(self._arena, placement, box, array, origin)
            return
        pieces = (
            piece
            for start in range(0, box.numel, step)
            for piece in box.runs(start, min(step, box.numel - start))
        )
        # To consume the results is what raises errors.
        for _ in self._threads.map(
            lambda piece: _copy(self._arena, placement, piece, array, origin), pieces
        ):
            pass

    def _note(self, segment: Segment, length: int) -> None:
        size = len(serialize_segment(segment)) + 8
        if self._segments and (
            len(self._segments) >= self._max_segments
            or self._header + size > HEADER_BYTES
            or self._placed > TOLD_BYTES
        ):
            self._tell()
        self._segments.append(segment)
        self._header += size
        self._placed += length

    def own(self) -> None:
        """Copy what waits, so that its arrays may change: only what goes inline does."""
        self._inline.own()

    def flush(self) -> None:
        """Tell of everything that was placed, and send what goes inline."""
        self._inline.flush()
        self._tell()

    def _tell(self) -> None:
        if not self._segments:
            return
        segments, placed = tuple(self._segments), self._placed
        data = serialize_chunk("", segments, (), ChecksumType.NONE)
        self._reset()
        self._emit(Message(data, segments, 0, placed))


def _copy(
    arena: MappedArena, placement: TensorPlacement, box: Region, array: Array, origin: Region
) -> None:
    """Copy a box of a tensor to each part of the arena in which elements of it lie."""
    source = elements(array.read(box.relative_to(origin)), array.dtype, box.sizes)
    for part in placement.parts:
        common = box.intersect(part.region)
        if common is None:
            continue
        # An array, even if it has 0 dimensions.
        here = np.asarray(source[common.relative_to(box).slices])
        there = arena.array(array.dtype, part, common)
        # A trainer that has computed into the arena has nothing to be copied.
        if here.ctypes.data != there.ctypes.data or here.strides != there.strides:
            np.copyto(there, here)
