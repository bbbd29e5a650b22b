"""One worker's part in a session over several workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from weightsync.core.errors import EngineUnavailableError, UnknownSessionError, WeightSyncError
from weightsync.core.trace import Trace
from weightsync.core.types import (
    ChecksumType,
    Scope,
    SessionState,
    Target,
    Transport,
    UpdateRequest,
)
from weightsync.core.views import CommitReport
from weightsync_client.chunker import Message
from weightsync_client.errors import ConnectionLostError, DeadlineError
from weightsync_client.planner import Needs
from weightsync_client.report import Outcome, WorkerReport
from weightsync_client.resume import Lane
from weightsync_client.stream import Stream
from weightsync_client.worker import Worker

T = TypeVar("T")

_RETRY_PAUSE = 0.5


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How bytes travel.

    Attributes:
        checksum: How payloads are protected.
        chunk_bytes: Most payload per message; None: what the workers advise.
        transports: The ways that bytes may take, the best first; shared memory only where worker
            and sender are one user's on one host.
        streams: Connections per worker. More than one helps on fast networks with many cores.
        window_bytes: Most payload that is kept until a worker has acknowledged it.
        patience: How long to wait for a lost worker to come back, or for an engine that is not
            at a step boundary, in seconds.
    """

    checksum: ChecksumType = ChecksumType.XXH3_64
    chunk_bytes: int | None = None
    transports: tuple[Transport, ...] = (Transport.SHARED_MEMORY, Transport.INLINE)
    streams: int = 1
    window_bytes: int = 64 << 20
    patience: float = 30.0


class Member:
    """A worker and its session: the lanes into it, and its way through the two phases."""

    def __init__(
        self,
        worker: Worker,
        session_id: str,
        request: UpdateRequest,
        options: SendOptions,
        trace: Trace,
    ) -> None:
        """Take an open session and ask what the worker needs."""
        self.worker = worker
        self.session_id = session_id
        self.limits = worker.info().limits
        self.needs = Needs(worker.tensors(request.targets), request)
        self.arena = worker.arena(session_id)
        self.commit: CommitReport | None = None
        self._trace = trace
        self._full = request.scope is Scope.FULL
        self._patience = options.patience
        window = options.window_bytes // options.streams
        self._lanes = [self._lane(index, window) for index in range(options.streams)]
        self._next = 0

    def _lane(self, index: int, window_bytes: int) -> Lane:
        return Lane(
            lambda: Stream(self.worker, self.session_id, index, self.worker.timeout),
            self._state,
            self._still_missing,
            window_bytes,
        )

    def send(self, message: Message) -> None:
        """Send a message by the next lane."""
        self._lanes[self._next].send(message)
        self._next = (self._next + 1) % len(self._lanes)

    def settle(self) -> None:
        """Wait until the worker has all that was sent."""
        for lane in self._lanes:
            lane.settle()

    def prepare(self) -> None:
        """Take the first phase, unless the second is done already."""
        if self.commit is None:
            with self._step("worker.prepare"):
                self._patiently(self.worker.prepare)

    def finish(self) -> CommitReport:
        """Take the second phase. Idempotent."""
        if self.commit is None:
            with self._step("worker.finish"):
                self.commit = self._patiently(self.worker.finish)
        return self.commit

    def _step(self, name: str) -> AbstractContextManager[dict[str, object]]:
        return self._trace.span(name, worker=self.worker.address, session_id=self.session_id)

    def _patiently(self, call: Callable[[str], T]) -> T:
        """Call for the session; wait for an engine that can't pause right now.

        A connection that is lost meanwhile says nothing about the call, which is idempotent: it
        is made again.
        """
        end = time.monotonic() + self._patience
        while True:
            try:
                return call(self.session_id)
            except (EngineUnavailableError, ConnectionLostError) as error:  # noqa: PERF203
                if time.monotonic() > end:
                    raise
                if isinstance(error, ConnectionLostError):
                    self._state()
                else:
                    time.sleep(error.retry_after or _RETRY_PAUSE)

    def abort(self, cause: str) -> None:
        """Drop the session, and what is on its way."""
        for lane in self._lanes:
            lane.cancel()
        if self.commit is None:
            self.worker.abort(self.session_id, cause)

    def report(self, error: WeightSyncError | None = None) -> WorkerReport:
        """Say what the worker made of the session; `error` is why it did not commit."""
        held: dict[Target, str] = {}
        if self.commit is not None:
            outcome = Outcome.COMMITTED
            held = {status.target: status.weight_version for status in self.commit.targets}
        else:
            outcome = Outcome.UNKNOWN
            # Who can't be asked holds nobody knows what.
            with contextlib.suppress(WeightSyncError):
                targets = self.worker.info().targets
                held = {status.target: status.weight_version for status in targets}
                outcome = self._outcome(error)
        return WorkerReport(self.worker.address, self.session_id, outcome, held, self.commit, error)

    def _outcome(self, error: WeightSyncError | None) -> Outcome:
        try:
            state = self.worker.session(self.session_id).state
        except UnknownSessionError:
            return Outcome.NOT_COMMITTED  # It was restarted.
        if state is SessionState.COMMITTED:
            return Outcome.COMMITTED
        # Without an answer the commit may be about to happen.
        unsure = not state.ended and isinstance(error, ConnectionLostError | DeadlineError)
        return Outcome.UNKNOWN if unsure else Outcome.NOT_COMMITTED

    def _state(self) -> SessionState:
        return self.worker.session(self.session_id, wait=self._patience).state

    def _still_missing(self, messages: Sequence[Message]) -> list[Message]:
        if not self._full:
            # Of a PARTIAL session only what was begun is listed; sending twice is harmless.
            return list(messages)
        missing = list(self.worker.missing(self.session_id))
        return [m for m in messages if self.needs.lacks(m.segments, missing)]
