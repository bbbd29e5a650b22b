"""What a worker knows of its sessions and targets, under one lock, and how a session ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from weightsync.core.errors import SessionStateError
from weightsync.core.events import EventLog
from weightsync.core.session import Session, SessionTable
from weightsync.core.trace import Trace
from weightsync.core.types import Limits, SessionState, Target, TargetState
from weightsync.core.views import EventKind, SessionInfo, TargetStatus
from weightsync.engines.base import Engine
from weightsync.server.models import Models, Plan
from weightsync.server.reading import Reader
from weightsync.server.update import Update

_ENDED = {
    SessionState.COMMITTED: EventKind.COMMITTED,
    SessionState.ABORTED: EventKind.ABORTED,
    SessionState.EXPIRED: EventKind.EXPIRED,
    SessionState.FAILED: EventKind.FAILED,
}


class Books:
    """The shared state of a worker's parts.

    Attributes:
        engine: With its models loaded.
        limits: Sizes that are enforced.
        trace: Told of every step.
        lock: Guards all that follows; held for moments only, notified when a session changes.
        models: Layouts and records of the targets.
        table: The sessions.
        updates: The parts of sessions that have not ended, by session id.
        events: What happened.
        reader: Live weights out; is told when they change.
        closing: True once sessions that are not being committed are dropped, for the worker stops.
    """

    def __init__(self, engine: Engine, limits: Limits, trace: Trace) -> None:
        """Open the books of an engine."""
        self.engine = engine
        self.limits = limits
        self.trace = trace
        self.lock = threading.Condition(threading.RLock())
        self.models = Models(engine)
        self.table = SessionTable(
            default_lease=limits.default_lease,
            max_lease=limits.max_lease,
            max_sessions=limits.max_sessions,
        )
        self.updates: dict[str, Update] = {}
        self.events = EventLog(max_watchers=limits.max_watchers)
        self.reader = Reader(self.models, self.lock, limits)
        # Turns the monotonic clock into Unix seconds; taken once, so that answers repeat exactly.
        self.wall_offset = time.time() - time.monotonic()
        self._draining = False
        self.closing = False
        self._serving_changed: list[Callable[[bool], None]] = []

    # -- what they say -------------------------------------------------------------------------

    def info(self, session: Session) -> SessionInfo:
        """Return what callers see of a session."""
        with self.lock:
            update = self.updates.get(session.session_id)
            return session.info(
                wall_offset=self.wall_offset,
                missing_bytes=update.staging.missing_bytes if update else 0,
            )

    def statuses(self, targets: Iterable[Target]) -> tuple[TargetStatus, ...]:
        """Return what callers see of targets."""
        with self.lock:
            plan = self.models.plan
            return tuple(
                self._status(target, plan) for target in sorted(targets, key=lambda t: t.value)
            )

    def _status(self, target: Target, plan: Plan) -> TargetStatus:
        record = self.models.records[target]
        holder = self.table.holder(target)
        return TargetStatus(
            target=target,
            state=record.state,
            weight_version=record.weight_version,
            num_tensors=sum(not t.composite for t in plan.layouts[target].tensors.values()),
            num_bytes=plan.shares.nbytes(target),
            num_unwritten=self.models.num_unwritten(target),
            num_commits=record.num_commits,
            session_id=holder.session_id if holder else "",
            quarantine_reason=record.quarantine_reason,
            last_commit_time=record.last_commit_time,
        )

    def update(self, session_id: str) -> Update:
        """Return the parts of a session that has not ended.

        Raises:
            UnknownSessionError: there is none.
            SessionStateError, SessionExpiredError: it has ended.
        """
        with self.lock:
            session = self.table.get(session_id)
            update = self.updates.get(session_id)
            if update is None:
                session.check_open()
                raise SessionStateError(f"session {session_id} has ended; start a new one")
            return update

    # -- whether the worker serves -------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Tell whether the worker is stopping."""
        return self._draining

    @property
    def serving(self) -> bool:
        """Tell whether sessions are taken and every target may serve."""
        with self.lock:
            states = {record.state for record in self.models.records.values()}
            return not self._draining and states == {TargetState.READY}

    def on_serving_change(self, callback: Callable[[bool], None]) -> None:
        """Call back with `serving` whenever it may have changed."""
        self._serving_changed.append(callback)

    def tell_serving(self) -> None:
        """Call back those who want to know."""
        for callback in tuple(self._serving_changed):
            callback(self.serving)

    def drain(self) -> None:
        """Take no new sessions from now on."""
        with self.lock:
            self._draining = True
        self.tell_serving()

    # -- what happens --------------------------------------------------------------------------

    def publish(self, kind: EventKind, session: Session, cause: str = "") -> None:
        """Tell the watchers of a session."""
        request = session.request
        self.events.publish(
            kind,
            request.targets,
            session.session_id,
            request.weight_version,
            cause,
            time=time.time(),
        )
        self.tell_serving()

    def quarantine(self, update: Update, reason: str) -> None:
        """Let no target serve whose content is not known."""
        with self.lock:
            hit = set(update.session.request.targets) | {
                member.target
                for block in update.staging.blocks
                for member in update.plan.shares.members(block.key)
            }
            for target in hit:
                record = self.models.records[target]
                record.state, record.quarantine_reason = TargetState.QUARANTINED, reason
                record.weight_version = ""
                self.engine.gate.quarantine(target, reason)
                self.trace.told(
                    "quarantine",
                    session_id=update.session.session_id,
                    target=target,
                    reason=reason,
                )
        self.publish(EventKind.QUARANTINED, update.session, reason)

    def expire(self) -> None:
        """End the sessions whose lease has run out."""
        with self.lock:
            overdue = [self.updates[s.session_id] for s in self.table.overdue(time.monotonic())]
            for update in overdue:
                # Nobody else may end it meanwhile.
                update.session.sealed = True
        for update in overdue:
            session = update.session
            reason = (
                f"it was prepared, and nobody finished it for {session.prepared_lease:g} s"
                if session.state is SessionState.PREPARED
                else f"no write came for {session.lease:g} s"
            )
            self.end(update, SessionState.EXPIRED, reason)

    def abort_all(self, cause: str) -> None:
        """Drop all sessions; a commit that is under way comes to its end first."""
        with self.lock:
            open_ones = list(self.updates.values())
        for update in open_ones:
            with update.phase:
                self.end(update, SessionState.ABORTED, cause)

    def end(self, update: Update, state: SessionState, reason: str = "") -> None:
        """End a session once, and give back all that it holds."""
        session = update.session
        if update.in_place:
            # Behind this no live weight is written any more, so that it is known whether one was.
            update.staging.seal()
        with self.lock:
            if self.updates.pop(session.session_id, None) is None:
                return
            unfinished = state in (SessionState.ABORTED, SessionState.EXPIRED)
            if unfinished and update.in_place and update.touched:
                self.quarantine(update, f"an IN_PLACE session did not finish: {reason}")
            self.table.end(session, state, reason)
            # Before anybody hears that the last session is over: a stop then closes the events.
            self.publish(_ENDED[state], session, reason)
            self.lock.notify_all()
        update.staging.close()
        if update.in_place:
            self.reader.end_change()
            self.engine.gate.resume(session.session_id)
        self.trace.told(
            "session.ended",
            session_id=session.session_id,
            outcome=state.name.lower(),
            reason=reason,
            **facts(session),
        )


def facts(session: Session) -> dict[str, object]:
    """Return what every step tells of its session."""
    return {
        "targets": sorted(str(target) for target in session.request.targets),
        "weight_version": session.request.weight_version,
        "holder": session.request.holder,
    }
