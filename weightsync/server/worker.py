"""The heart of the service, without gRPC: what each rpc does, in core types.

Locks: the books' `lock` is held for moments only; an update's `phase` is held while it is
prepared, committed or dropped. No lock is held while bytes are copied into the arena.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightsync import __version__
from weightsync.arena.arena import ArenaBudget
from weightsync.core.admission import Admission
from weightsync.core.errors import DrainingError, SessionStateError
from weightsync.core.events import EventStream
from weightsync.core.trace import Trace
from weightsync.core.types import Limits, SessionState, Target, Transport, UpdateRequest
from weightsync.core.views import (
    CommitReport,
    EventKind,
    MissingTensor,
    PrepareReport,
    SessionInfo,
    TensorPlacement,
    WorkerInfo,
)
from weightsync.engines.base import Engine
from weightsync.server import opening
from weightsync.server.books import Books, facts
from weightsync.server.finishing import Finisher
from weightsync.server.lending import Lending, not_shared
from weightsync.server.reading import Reader
from weightsync.server.reaper import Reaper
from weightsync.server.switch import EngineSwitch
from weightsync.server.update import StreamSink, Update
from weightsync.wire.chunk import Chunk

__all__ = ["EventStream", "Worker"]


class Worker:
    """One inference worker: its engine, its sessions, and the promises about them.

    Attributes:
        instance_id: New for each worker: a restart is visible.
        limits: Sizes that are enforced.
        trace: Told of every step.
        reader: Live weights out.
        lending: Hands arenas to clients on the same host.
        switch: Holds, puts to sleep and wakes the engine.
    """

    def __init__(
        self, engine: Engine, *, limits: Limits | None = None, trace: Trace | None = None
    ) -> None:
        """Serve an engine.

        Args:
            engine: With its models loaded.
            limits: Sizes that are enforced; default: those of `Limits`.
            trace: Told of every step.
        """
        self.instance_id = uuid.uuid4().hex
        self.limits = limits or Limits()
        self.trace = trace or Trace()
        self._engine = engine
        self._books = books = Books(engine, self.limits, self.trace)
        # Once: to look at every tensor is too much for a call that answers at all times.
        self._modes = opening.modes(books.models.live())
        self._budget = ArenaBudget(self.limits.max_arena_bytes)
        self.lending = Lending(books)
        self._streams = Admission("UpdateWeights streams", self.limits.max_streams)
        self._reaper = Reaper(books.lock, books.table.next_expiry, books.expire)
        self._finisher = Finisher(books, self._reaper.wake)
        self.reader: Reader = books.reader
        self.switch = EngineSwitch(books)

    # -- what it is ----------------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        """Return identity and state."""
        engine = self._engine
        return WorkerInfo(
            instance_id=self.instance_id,
            engine=engine.name,
            engine_version=engine.version,
            server_version=__version__,
            coordinates=engine.coordinates,
            targets=self._books.statuses(engine.targets),
            limits=self.limits,
            modes=self._modes,
            controls=self.switch.controls,
            transports=self.lending.transports,
            shared_memory_socket=self.lending.socket,
        )

    def targets(self, named: frozenset[Target] = frozenset()) -> list[Target]:
        """Return the named targets in order, or all.

        Raises:
            TargetAbsentError: the worker does not have one of them.
        """
        return opening.known(self._engine, named or frozenset(self._engine.targets))

    @property
    def staging_bytes(self) -> int:
        """Bytes that sessions hold in arenas now."""
        return self._budget.used

    @property
    def num_reloaded(self) -> dict[Target, int]:
        """Number of tensors, by target, that the engine itself loads into its layers."""
        return {
            target: sum(tensor.reloaded for tensor in layout.tensors.values())
            for target, layout in self._books.models.plan.layouts.items()
        }

    @property
    def open_streams(self) -> int:
        """Number of UpdateWeights streams that are open."""
        return self._streams.open

    @property
    def serving(self) -> bool:
        """Tell whether sessions are taken and every target may serve."""
        return self._books.serving

    def on_serving_change(self, callback: Callable[[bool], None]) -> None:
        """Call back with `serving` whenever it may have changed."""
        self._books.on_serving_change(callback)

    def watch(self, after_sequence: int = 0) -> EventStream:
        """Open a stream of events, see `EventLog.subscribe`.

        Raises:
            TooManyStreamsError: too many are watching.
        """
        return self._books.events.subscribe(after_sequence)

    # -- a session, from start ... -------------------------------------------------------------

    def start(self, request: UpdateRequest) -> SessionInfo:
        """Open a session, or return the one that the same request has opened.

        Raises:
            WeightSyncError: as StartWeightUpdate in the contract.
        """
        books = self._books
        opening.known(self._engine, request.targets)
        with books.lock:
            if books.draining:
                raise DrainingError("the worker is stopping and takes no new sessions")
            repeated = books.table.repeated(request)
            if repeated is not None:
                return books.info(repeated)
            update = self._open(request)
        session = update.session
        with update.phase:
            try:
                # The engine may have gone to sleep, or the worker may have stopped, right now.
                books.update(session.session_id)
                if update.in_place:
                    books.engine.gate.pause(session.session_id, self.limits.gate_timeout)
            except BaseException:
                self._take_back(update)
                raise
            with books.lock:
                session.sealed = False
                session.renew(time.monotonic())
                self._reaper.wake()
            self.trace.told("session.started", session_id=session.session_id, **facts(session))
            books.publish(EventKind.STARTED, session)
        return books.info(session)

    def _open(self, request: UpdateRequest) -> Update:
        """Open a session that is still sealed; with the lock held."""
        books = self._books
        books.models.refresh()
        opening.check(request, books.models)
        transport = self.lending.choose(request)
        session = books.table.open(request, time.monotonic(), wall_offset=books.wall_offset)
        session.sealed = True
        session.transport = transport
        try:
            update = opening.make(
                session,
                self._engine,
                books.models,
                budget=self._budget,
                arenas=self.lending.arenas,
                trace=self.trace,
            )
        except BaseException:
            books.table.forget(session)
            raise
        books.updates[session.session_id] = update
        if update.in_place:
            books.reader.begin_change()
        return update

    def _take_back(self, update: Update) -> None:
        """Undo `_open`, unless the session was aborted meanwhile."""
        books = self._books
        with books.lock:
            if books.updates.pop(update.session.session_id, None) is None:
                return
            books.table.forget(update.session)
            if update.in_place:
                books.reader.end_change()
        update.staging.close()

    @contextmanager
    def stream(self, session_id: str) -> Iterator[StreamSink]:
        """Open a stream into a session; chunks are taken by the sink's `write`.

        Raises:
            UnknownSessionError, SessionStateError, SessionExpiredError: it takes no chunks.
            TooManyStreamsError: too many streams are open.
        """
        books = self._books
        with self._streams:
            with books.lock:
                update = books.update(session_id)
                update.session.check_open()
                update.session.streams += 1
            try:
                with self.trace.span("stream", session_id=session_id):
                    yield StreamSink(update, lambda chunk: self._take(update, chunk))
            finally:
                with books.lock:
                    update.session.streams -= 1
                    books.lock.notify_all()

    def _take(self, update: Update, chunk: Chunk) -> float:
        """Take one chunk; return the new end of the lease, in Unix seconds."""
        session, lock, nbytes = update.session, self._books.lock, chunk.nbytes
        with self.trace.span("chunk", session_id=session.session_id, nbytes=nbytes):
            with lock:
                session.check_open()
                session.renew(time.monotonic())
            chunk.check()
            # Set before the first byte moves: a write that fails half-way has touched, too.
            update.touched = update.touched or bool(chunk.segments)
            update.staging.write(chunk.segments, chunk.payload)
            with lock:
                session.received_bytes += nbytes
                session.renew(time.monotonic())
                return session.expires + self._books.wall_offset

    def update(self, session_id: str) -> SessionInfo:
        """Return where a session stands.

        Raises:
            UnknownSessionError: there is none.
        """
        with self._books.lock:
            return self._books.info(self._books.table.get(session_id))

    def missing(
        self, session_id: str, start: int, limit: int
    ) -> tuple[list[MissingTensor], int | None]:
        """Return `limit` missing tensors from the `start`-th on, and the number that follows.

        Raises:
            UnknownSessionError: there is no such session.
        """
        with self._books.lock:
            self._books.table.get(session_id)
            update = self._books.updates.get(session_id)
        page: list[MissingTensor] = []
        for index, tensor in enumerate(update.staging.missing() if update else ()):
            if index >= start + limit:
                return page, index
            if index >= start:
                page.append(tensor)
        return page, None

    def placements(self, session_id: str, client: str) -> Iterator[TensorPlacement]:
        """Yield where the tensors of a session lie in its arena, which a client may have then.

        Raises:
            UnknownSessionError, SessionStateError, SessionExpiredError: there is no open session.
            UnsupportedError: its bytes come another way.
            TooManyStreamsError: too many are reading.
        """
        update = self._books.update(session_id)
        if update.session.transport is not Transport.SHARED_MEMORY:
            raise not_shared(session_id)
        with self._books.lock:
            update.borrowers.add(client)
        with self.reader.admission:
            yield from update.staging.placements()

    # -- ... to its end ------------------------------------------------------------------------

    def prepare(self, session_id: str, timeout: float | None = None) -> PrepareReport:
        """Check that a session is complete and ready; wait `timeout` seconds for its streams.

        Raises:
            WeightSyncError: as PrepareWeightUpdate in the contract.
        """
        return self._finisher.prepare(session_id, timeout)

    def finish(self, session_id: str, timeout: float | None = None) -> CommitReport:
        """Make a session live, between two forward passes, for all its targets together.

        Raises:
            WeightSyncError: as FinishWeightUpdate in the contract.
        """
        return self._finisher.finish(session_id, timeout)

    def abort(self, session_id: str, cause: str = "") -> SessionInfo:
        """Drop a session. Idempotent.

        Raises:
            UnknownSessionError: there is none.
            SessionStateError: it is committed, or being committed.
        """
        books = self._books
        with books.lock:
            session = books.table.get(session_id)
            update = books.updates.get(session_id)
            if session.state is SessionState.COMMITTED or session.sealed:
                state = "being finished" if session.sealed else "committed"
                raise SessionStateError(
                    f"session {session_id} is {state} and can't be aborted", state=state
                )
            # Nobody else may begin to finish it from here on.
            session.sealed = not session.state.ended
        if update is not None:
            books.end(update, SessionState.ABORTED, cause or "aborted by a caller")
        return books.info(session)

    # -- stopping ------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new sessions."""
        self._books.drain()

    def close(self, grace: float = 0.0) -> None:
        """Stop: wait `grace` seconds for open sessions, abort the others. Idempotent."""
        books = self._books
        self.drain()
        with books.lock:
            books.lock.wait_for(lambda: not books.table.open_sessions(), grace)
            books.closing = True
            books.lock.notify_all()
        books.abort_all("the worker is stopping")
        self._reaper.close()
        self.lending.close()
        books.events.close()
