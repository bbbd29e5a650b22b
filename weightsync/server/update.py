"""What belongs to one session while it runs, and the sink of one of its streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from weightsync.arena.arena import Arena
from weightsync.arena.staging import Staging
from weightsync.core.session import Session
from weightsync.core.types import TensorKey, UpdateMode
from weightsync.core.views import PrepareReport, StreamReport
from weightsync.server.commit import Commit
from weightsync.server.models import Plan
from weightsync.wire.chunk import Chunk


@dataclass(slots=True)
class Update:
    """A session and its parts.

    Attributes:
        session: The bookkeeping.
        plan: The layouts that it was opened with.
        staging: What has arrived.
        commit: Its two phases.
        arena: Where its bytes lie; None for IN_PLACE.
        borrowers: Clients that may have the arena.
        phase: Held while it is prepared, committed or aborted.
        started: When it was opened, on the performance counter.
        touched: True once a byte may have reached a live weight (IN_PLACE).
        prepared: The answer of prepare.
        prepared_at: When it was prepared, on the performance counter.
    """

    session: Session
    plan: Plan
    staging: Staging
    commit: Commit
    arena: Arena | None = None
    borrowers: set[str] = field(default_factory=set)
    phase: threading.Lock = field(default_factory=threading.Lock)
    started: float = field(default_factory=time.perf_counter)
    touched: bool = False
    prepared: PrepareReport | None = None
    prepared_at: float = 0.0

    @property
    def in_place(self) -> bool:
        """Tell whether it writes live weights directly."""
        return self.session.request.mode is UpdateMode.IN_PLACE


class StreamSink:
    """Takes the chunks of one stream, in one thread."""

    def __init__(self, update: Update, take: Callable[[Chunk], float]) -> None:
        """Hand chunks to `take`, which returns the new end of the lease, in Unix seconds."""
        self._update = update
        self._take = take
        self._expire_time = 0.0
        self._bytes = 0
        self._chunks = 0
        self._sent: set[TensorKey] = set()

    def write(self, chunk: Chunk) -> None:
        """Take one chunk, whole or not at all.

        Raises:
            WeightSyncError: as UpdateWeights in the contract.
        """
        self._expire_time = self._take(chunk)
        self._bytes += chunk.nbytes
        self._chunks += 1
        self._sent.update(segment.key for segment in chunk.segments)

    def report(self) -> StreamReport:
        """Return what was taken so far."""
        ignored = self._update.staging.ignored
        mine = {key.name for key in self._sent}
        return StreamReport(
            received_bytes=self._bytes,
            received_chunks=self._chunks,
            applied_tensors=len(self._sent & self._update.staging.applied),
            ignored_names=tuple(name for name in ignored if name in mine),
            expire_time=self._expire_time,
        )
