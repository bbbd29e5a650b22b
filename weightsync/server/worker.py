"""The heart of the service, without gRPC: what each rpc does, in core types.

Locks: `_lock` guards the books (table, models, updates) and is held for moments only; an update's
`phase` is held while it is prepared, committed or dropped. Nothing is held while bytes are copied
into the arena.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from weightsync import __version__
from weightsync.arena.arena import ArenaBudget
from weightsync.core.admission import Admission
from weightsync.core.errors import (
    CommitFailedError,
    CommitRolledBackError,
    DrainingError,
    SessionStateError,
    StreamsOpenError,
)
from weightsync.core.events import EventLog, EventStream
from weightsync.core.session import Session, SessionTable
from weightsync.core.trace import Trace
from weightsync.core.types import (
    Limits,
    SessionState,
    Target,
    TargetState,
    UpdateRequest,
)
from weightsync.core.views import (
    CommitReport,
    EventKind,
    MissingTensor,
    PrepareReport,
    SessionInfo,
    TargetStatus,
    WorkerInfo,
)
from weightsync.engines.base import Engine
from weightsync.server import opening
from weightsync.server.commit import Outcome
from weightsync.server.models import Models, Plan
from weightsync.server.reading import Reader
from weightsync.server.reaper import Reaper
from weightsync.server.switch import EngineSwitch
from weightsync.server.update import StreamSink, Update
from weightsync.wire import checksum
from weightsync.wire.chunk import Chunk

__all__ = ["EventStream", "Worker"]

_ENDED = {
    SessionState.ABORTED: EventKind.ABORTED,
    SessionState.EXPIRED: EventKind.EXPIRED,
    SessionState.FAILED: EventKind.FAILED,
}


class Worker:
    """One inference worker: its engine, its sessions, and the promises about them."""

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
        self.limits = limits = limits or Limits()
        self.trace = trace or Trace()
        self._engine = engine
        self._lock = threading.Condition(threading.RLock())
        self._models = Models(engine)
        self._table = SessionTable(default_lease=limits.default_lease, max_lease=limits.max_lease)
        self._updates: dict[str, Update] = {}
        self._budget = ArenaBudget(limits.max_arena_bytes)
        self._streams = Admission("UpdateWeights streams", limits.max_streams)
        self._events = EventLog(max_watchers=limits.max_watchers)
        self._reaper = Reaper(self._lock, self._table.next_expiry, self._expire)
        self._draining = False
        # Turns the monotonic clock into Unix seconds; taken once, so that answers repeat exactly.
        self._wall_offset = time.time() - time.monotonic()
        self._serving_changed: list[Callable[[bool], None]] = []
        self.reader = Reader(self._models, self._lock, limits)
        self.switch = EngineSwitch(
            engine,
            models=self._models,
            table=self._table,
            lock=self._lock,
            limits=limits,
            trace=self.trace,
        )

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
            targets=self._statuses(engine.targets),
            limits=self.limits,
            modes=opening.modes(self._models.live()),
            controls=self.switch.controls,
        )

    @property
    def staging_bytes(self) -> int:
        """Bytes that sessions hold in arenas now."""
        return self._budget.used

    @property
    def open_streams(self) -> int:
        """Number of UpdateWeights streams that are open."""
        return self._streams.open

    @property
    def serving(self) -> bool:
        """Tell whether sessions are taken and every target may serve."""
        with self._lock:
            states = [record.state for record in self._models.records.values()]
            return not self._draining and TargetState.QUARANTINED not in states

    def on_serving_change(self, callback: Callable[[bool], None]) -> None:
        """Call back with `serving` whenever it may have changed."""
        self._serving_changed.append(callback)

    # -- a session, from start ... -------------------------------------------------------------

    def start(self, request: UpdateRequest) -> SessionInfo:
        """Open a session, or return the one that the same request has opened.

        Raises:
            WeightSyncError: as StartWeightUpdate in the contract.
        """
        opening.known(self._engine, request.targets)
        with self._lock:
            if self._draining:
                raise DrainingError("the worker is stopping and takes no new sessions")
            repeated = self._table.repeated(request)
            if repeated is not None:
                return self._info(repeated)
            self._models.refresh()
            opening.check(request, self._models)
            session = self._table.open(request, time.monotonic(), wall_offset=self._wall_offset)
            session.sealed = True
            try:
                update = opening.make(session, self._engine, self._models, self._budget, self.trace)
            except BaseException:
                self._table.forget(session)
                raise
            self._updates[session.session_id] = update
        try:
            if update.in_place:
                self._engine.gate.pause(session.session_id, self.limits.gate_timeout)
                self.reader.begin_change()
        except BaseException:
            with self._lock:
                self._table.forget(session)
                del self._updates[session.session_id]
            update.staging.close()
            raise
        with self._lock:
            session.sealed = False
            session.renew(time.monotonic())
            self._reaper.wake()
        self.trace("session.started", session_id=session.session_id, **_facts(session))
        self._publish(EventKind.STARTED, session)
        return self._info(session)

    @contextmanager
    def stream(self, session_id: str) -> Iterator[StreamSink]:
        """Open a stream into a session; chunks are taken by the sink's `write`.

        Raises:
            UnknownSessionError, SessionStateError, SessionExpiredError: it takes no chunks.
            TooManyStreamsError: too many streams are open.
        """
        with self._streams:
            with self._lock:
                update = self._known_update(session_id)
                update.session.check_open()
                update.session.streams += 1
            try:
                with self.trace.span("stream", session_id=session_id):
                    yield StreamSink(update, lambda chunk: self._take(update, chunk))
            finally:
                with self._lock:
                    update.session.streams -= 1
                    self._lock.notify_all()

    def _take(self, update: Update, chunk: Chunk) -> float:
        session = update.session
        with self.trace.span("chunk", session_id=session.session_id, nbytes=len(chunk.payload)):
            with self._lock:
                session.check_open()
                session.renew(time.monotonic())
            checksum.check(chunk.checksum_type, chunk.checksum, chunk.payload)
            # Set before the first byte moves: a write that fails half-way has touched, too.
            update.touched = True
            update.staging.write(chunk.segments, chunk.payload)
            with self._lock:
                session.received_bytes += len(chunk.payload)
                session.renew(time.monotonic())
                return session.expires + self._wall_offset

    def update(self, session_id: str) -> SessionInfo:
        """Return where a session stands."""
        with self._lock:
            return self._info(self._table.get(session_id))

    def missing(
        self, session_id: str, start: int, limit: int
    ) -> tuple[list[MissingTensor], int | None]:
        """Return `limit` missing tensors from the `start`-th on, and the number that follows."""
        with self._lock:
            session = self._table.get(session_id)
            update = self._updates.get(session_id)
        if update is None or session.state.ended:
            return [], None
        page: list[MissingTensor] = []
        for index, tensor in enumerate(update.staging.missing()):
            if index >= start + limit:
                return page, index
            if index >= start:
                page.append(tensor)
        return page, None

    # -- ... to its end ------------------------------------------------------------------------

    def prepare(self, session_id: str, timeout: float | None = None) -> PrepareReport:
        """Check that a session is complete and ready; wait `timeout` seconds for its streams.

        Raises:
            WeightSyncError: as PrepareWeightUpdate in the contract.
        """
        update = self._known_update(session_id)
        with update.phase:
            return self._prepare(update, timeout)

    def _prepare(self, update: Update, timeout: float | None) -> PrepareReport:
        session = update.session
        if update.prepared is not None and session.state is SessionState.PREPARED:
            with self._lock:
                session.renew(time.monotonic())
            return update.prepared
        self._seal(session, timeout)
        start = time.perf_counter()
        try:
            with self.trace.span("prepare", session_id=session.session_id, **_facts(session)):
                update.commit.check()
        except BaseException:
            self._unseal(session)
            raise
        with self._lock:
            session.state = SessionState.PREPARED
            self._unseal(session)
            update.prepared_at = start
            update.prepared = PrepareReport(self._info(session), time.perf_counter() - start)
        self._publish(EventKind.PREPARED, session)
        return update.prepared

    def _seal(self, session: Session, timeout: float | None) -> None:
        """Let the open streams end, then take no more chunks."""
        limit = self.limits.drain_timeout
        seconds = limit if timeout is None else min(timeout, limit)
        with self._lock:
            session.check_open()
            self._lock.wait_for(
                lambda: session.streams == 0 or session.state is not SessionState.OPEN, seconds
            )
            session.check_open()
            if session.streams:
                raise StreamsOpenError(
                    f"{session.streams} streams of session {session.session_id} are still open"
                    f" after {seconds:g} s; end them, then call again",
                    retry_after=1.0,
                )
            session.sealed = True

    def _unseal(self, session: Session) -> None:
        with self._lock:
            session.sealed = False
            session.renew(time.monotonic())
            self._reaper.wake()

    def finish(self, session_id: str, timeout: float | None = None) -> CommitReport:
        """Make a session live, between two forward passes, for all its targets together.

        Raises:
            WeightSyncError: as FinishWeightUpdate in the contract.
        """
        with self._lock:
            session = self._table.get(session_id)
            if session.report is not None:
                return session.report
            if session.failure is not None:
                raise session.failure
        update = self._known_update(session_id)
        with update.phase:
            if update.session.report is not None:
                return update.session.report
            if update.session.failure is not None:
                raise update.session.failure
            prepared = self._prepare(update, timeout)
            with self._lock:
                # The lease may have run out between the two phases.
                if update.session.state is not SessionState.PREPARED:
                    update.session.check_open()
                update.session.sealed = True
            seconds = self.limits.gate_timeout
            return self._commit(
                update, prepared, seconds if timeout is None else min(timeout, seconds)
            )

    def _commit(self, update: Update, prepared: PrepareReport, timeout: float) -> CommitReport:
        session = update.session
        try:
            with (
                self.trace.span(
                    "commit", session_id=session.session_id, **_facts(session)
                ) as facts,
                self.reader.change(),
            ):
                outcome = update.commit.run(timeout)
                self._record(update)
                facts |= {"pause": outcome.pause_seconds, "applied_bytes": outcome.applied_bytes}
        except (CommitRolledBackError, CommitFailedError) as error:
            session.failure = error
            if isinstance(error, CommitFailedError):
                self._quarantine(update, str(error))
            self._end(update, SessionState.FAILED, str(error))
            raise
        except BaseException:
            self._unseal(session)
            raise
        report = self._report(update, prepared, outcome)
        self._end(update, SessionState.COMMITTED)
        return report

    def _record(self, update: Update) -> None:
        session = update.session
        with self._lock:
            for block in update.staging.blocks:
                boxes = [box for box, _ in block.written()]
                self._models.mark_written(update.plan, block.key, boxes)
            for target in session.request.targets:
                record = self._models.records[target]
                record.weight_version = session.request.weight_version
                record.num_commits += 1
                record.last_commit_time = time.time()
                if record.state is TargetState.QUARANTINED:
                    record.state, record.quarantine_reason = TargetState.READY, ""
                    self._engine.gate.quarantine(target, None)
                    self.trace("quarantine.lifted", target=target)

    def _report(self, update: Update, prepared: PrepareReport, outcome: Outcome) -> CommitReport:
        session = update.session
        with self._lock:
            session.state = SessionState.COMMITTED
            session.report = CommitReport(
                session=self._info(session),
                # The session holds them no longer once the caller reads this.
                targets=tuple(
                    replace(status, session_id="")
                    for status in self._statuses(session.request.targets)
                ),
                applied_tensors=len(
                    {update.plan.shares.group(key) or str(key) for key in update.staging.applied}
                ),
                applied_bytes=outcome.applied_bytes,
                ignored_names=update.staging.ignored,
                receive_seconds=update.prepared_at - update.started,
                prepare_seconds=prepared.prepare_seconds,
                pause_seconds=outcome.pause_seconds,
                checked_share_groups=outcome.checked_share_groups,
                cache_reset=outcome.cache_reset,
            )
            return session.report

    def abort(self, session_id: str, cause: str = "") -> SessionInfo:
        """Drop a session. Idempotent.

        Raises:
            UnknownSessionError: there is none.
            SessionStateError: it is committed, or being committed.
        """
        with self._lock:
            session = self._table.get(session_id)
            update = self._updates.get(session_id)
            if session.state is SessionState.COMMITTED or session.sealed:
                state = "being finished" if session.sealed else "committed"
                raise SessionStateError(
                    f"session {session_id} is {state} and can't be aborted", state=state
                )
        if update is not None and not session.state.ended:
            self._end(update, SessionState.ABORTED, cause or "aborted by a caller")
        with self._lock:
            return self._info(session)

    def _expire(self) -> None:
        """End the sessions whose lease has run out."""
        with self._lock:
            overdue = [self._updates[s.session_id] for s in self._table.overdue(time.monotonic())]
            for update in overdue:
                update.session.sealed = True
        for update in overdue:
            reason = f"no write came for {update.session.lease:g} s"
            self._end(update, SessionState.EXPIRED, reason)

    def _end(self, update: Update, state: SessionState, reason: str = "") -> None:
        """End a session once, and give back all that it holds."""
        session = update.session
        with self._lock:
            if self._updates.pop(session.session_id, None) is None:
                return
            unfinished = state in (SessionState.ABORTED, SessionState.EXPIRED)
            if unfinished and update.in_place and update.touched:
                self._quarantine(update, f"an IN_PLACE session did not finish: {reason}")
            self._table.end(session, state, reason)
            self._lock.notify_all()
        update.staging.close()
        if update.in_place:
            self.reader.end_change()
            self._engine.gate.resume(session.session_id)
        self._publish(_ENDED.get(state, EventKind.COMMITTED), session, reason)
        outcome = state.name.lower()
        self.trace(
            "session.ended",
            session_id=session.session_id,
            outcome=outcome,
            reason=reason,
            **_facts(session),
        )

    def _quarantine(self, update: Update, reason: str) -> None:
        """Let no target serve whose content is not known."""
        with self._lock:
            hit = set(update.session.request.targets) | {
                member.target
                for block in update.staging.blocks
                for member in update.plan.shares.members(block.key)
            }
            for target in hit:
                record = self._models.records[target]
                record.state, record.quarantine_reason = TargetState.QUARANTINED, reason
                record.weight_version = ""
                self._engine.gate.quarantine(target, reason)
                self.trace("quarantine", target=target, reason=reason)
        self._publish(EventKind.QUARANTINED, update.session, reason)

    # -- what others see -----------------------------------------------------------------------

    def targets(self, named: frozenset[Target] = frozenset()) -> list[Target]:
        """Return the named targets in order, or all.

        Raises:
            TargetAbsentError: the worker does not have one of them.
        """
        return opening.known(self._engine, named or frozenset(self._engine.targets))

    def watch(self, after_sequence: int = 0) -> EventStream:
        """Open a stream of events, see `EventLog.subscribe`.

        Raises:
            TooManyStreamsError: too many are watching.
        """
        return self._events.subscribe(after_sequence)

    def _statuses(self, targets: Iterable[Target]) -> tuple[TargetStatus, ...]:
        with self._lock:
            plan = self._models.plan
            return tuple(
                self._status(target, plan) for target in sorted(targets, key=lambda t: t.value)
            )

    def _status(self, target: Target, plan: Plan) -> TargetStatus:
        record = self._models.records[target]
        holder = self._table.holder(target)
        return TargetStatus(
            target=target,
            state=record.state,
            weight_version=record.weight_version,
            num_tensors=sum(not t.composite for t in plan.layouts[target].tensors.values()),
            num_bytes=plan.shares.nbytes(target),
            num_unwritten=self._models.num_unwritten(target),
            num_commits=record.num_commits,
            session_id=holder.session_id if holder else "",
            quarantine_reason=record.quarantine_reason,
            last_commit_time=record.last_commit_time,
        )

    def _info(self, session: Session) -> SessionInfo:
        update = self._updates.get(session.session_id)
        return session.info(
            wall_offset=self._wall_offset,
            missing_bytes=update.staging.missing_bytes if update else 0,
        )

    def _publish(self, kind: EventKind, session: Session, cause: str = "") -> None:
        request = session.request
        self._events.publish(
            kind,
            request.targets,
            session.session_id,
            request.weight_version,
            cause,
            time=time.time(),
        )
        self._tell_serving()

    def _tell_serving(self) -> None:
        for callback in tuple(self._serving_changed):
            callback(self.serving)

    def _known_update(self, session_id: str) -> Update:
        """Return a session's parts; those of ended ones as long as they are remembered."""
        with self._lock:
            session = self._table.get(session_id)
            update = self._updates.get(session_id)
            if update is None:
                session.check_open()
                raise SessionStateError(f"session {session_id} has ended")
            return update

    # -- stopping ------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new sessions."""
        with self._lock:
            self._draining = True
        self._tell_serving()

    def close(self, grace: float = 0.0) -> None:
        """Stop: wait `grace` seconds for open sessions, abort the others. Idempotent."""
        self.drain()
        with self._lock:
            self._lock.wait_for(lambda: not self._table.open_sessions(), grace)
            rest = list(self._updates.values())
        for update in rest:
            with update.phase:
                self._end(update, SessionState.ABORTED, "the worker is stopping")
        self._reaper.close()
        self._events.close()


def _facts(session: Session) -> dict[str, object]:
    """Return what every step tells of its session."""
    return {
        "targets": sorted(str(target) for target in session.request.targets),
        "weight_version": session.request.weight_version,
        "holder": session.request.holder,
    }
