"""One worker's part in a session over several workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.core.errors import EngineUnavailableError, WeightSyncError
from weightsync.core.types import ChecksumType, Scope, SessionState, UpdateRequest
from weightsync.core.views import CommitReport
from weightsync_client.chunker import Message
from weightsync_client.errors import ConnectionLostError, DeadlineError
from weightsync_client.planner import Needs
from weightsync_client.report import Outcome, WorkerReport
from weightsync_client.resume import Lane
from weightsync_client.stream import Stream
from weightsync_client.worker import Worker

_RETRY_PAUSE = 0.5


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How bytes travel.

    Attributes:
        checksum: How payloads are protected.
        chunk_bytes: Most payload per message; None: what the workers advise.
        streams: Connections per worker. More than one helps on fast networks with many cores.
        window_bytes: Most payload that is kept until a worker has acknowledged it.
        patience: How long to wait for a lost worker to come back, or for an engine that is not
            at a step boundary, in seconds.
    """

    checksum: ChecksumType = ChecksumType.XXH3_64
    chunk_bytes: int | None = None
    streams: int = 1
    window_bytes: int = 64 << 20
    patience: float = 30.0


class Member:
    """A worker and its session: the lanes into it, and its way through the two phases."""

    def __init__(
        self, worker: Worker, session_id: str, request: UpdateRequest, options: SendOptions
    ) -> None:
        """Take an open session and ask what the worker needs."""
        self.worker = worker
        self.session_id = session_id
        self.limits = worker.info().limits
        self.needs = Needs(worker.tensors(request.targets), request)
        self.commit: CommitReport | None = None
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
            self.worker.prepare(self.session_id)

    def finish(self) -> CommitReport:
        """Take the second phase. Idempotent; waits for an engine that can't pause right now.

        A connection that is lost meanwhile says nothing about the commit: it is asked again.
        """
        end = time.monotonic() + self._patience
        while self.commit is None:
            self._try_finish(last=time.monotonic() > end)
        return self.commit

    def _try_finish(self, *, last: bool) -> None:
        try:
            self.commit = self.worker.finish(self.session_id)
        except EngineUnavailableError as error:
            if last:
                raise
            time.sleep(error.retry_after or _RETRY_PAUSE)
        except ConnectionLostError:
            if last:
                raise
            self._state()

    def abort(self, cause: str) -> None:
        """Drop the session, and what is on its way."""
        for lane in self._lanes:
            lane.cancel()
        if self.commit is None:
            self.worker.abort(self.session_id, cause)

    def report(self, error: WeightSyncError | None = None) -> WorkerReport:
        """Say what the worker made of the session; `error` is why it did not commit."""
        if self.commit is not None:
            held = {status.target: status.weight_version for status in self.commit.targets}
            outcome = Outcome.COMMITTED
        else:
            try:
                info = self.worker.info()
            except WeightSyncError:
                held, outcome = {}, Outcome.UNKNOWN
            else:
                held = {status.target: status.weight_version for status in info.targets}
                outcome = Outcome.NOT_COMMITTED
                if isinstance(error, ConnectionLostError | DeadlineError) and any(
                    status.session_id == self.session_id for status in info.targets
                ):
                    outcome = Outcome.UNKNOWN
        return WorkerReport(self.worker.address, self.session_id, outcome, held, self.commit, error)

    def _state(self) -> SessionState:
        return self.worker.session(self.session_id, wait=self._patience).state

    def _still_missing(self, messages: Sequence[Message]) -> list[Message]:
        if not self._full:
            # Of a PARTIAL session only what was begun is listed; sending twice is harmless.
            return list(messages)
        missing = list(self.worker.missing(self.session_id))
        return [m for m in messages if self.needs.lacks(m.segments, missing)]
