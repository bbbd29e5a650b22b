"""From a filled session to live weights: prepare, then commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace

from weightsync.core.errors import (
    CommitFailedError,
    CommitRolledBackError,
    SessionStateError,
    StreamsOpenError,
)
from weightsync.core.session import Session
from weightsync.core.types import SessionState, TargetState
from weightsync.core.views import CommitReport, EventKind, PrepareReport
from weightsync.server.books import Books, facts
from weightsync.server.commit import Outcome
from weightsync.server.update import Update


class Finisher:
    """The two phases of the end of a session; an update's `phase` is held in each."""

    def __init__(self, books: Books, wake_reaper: Callable[[], None]) -> None:
        """Finish sessions of these books; `wake_reaper` is told when a lease counts again."""
        self._books = books
        self._wake_reaper = wake_reaper

    def prepare(self, session_id: str, timeout: float | None = None) -> PrepareReport:
        """Check that a session is complete and ready; wait `timeout` seconds for its streams.

        Raises:
            WeightSyncError: as PrepareWeightUpdate in the contract.
        """
        update = self._books.update(session_id)
        with update.phase:
            return self._prepare(update, timeout)

    def _prepare(self, update: Update, timeout: float | None) -> PrepareReport:
        session = update.session
        if update.prepared is not None and session.state is SessionState.PREPARED:
            with self._books.lock:
                session.renew(time.monotonic())
            return update.prepared
        self._seal(session, timeout)
        start = time.perf_counter()
        try:
            with self._books.trace.span("prepare", session_id=session.session_id, **facts(session)):
                update.commit.check()
        except BaseException:
            self._unseal(session)
            raise
        with self._books.lock:
            session.state = SessionState.PREPARED
            self._unseal(session)
            update.prepared_at = start
            update.prepared = PrepareReport(self._books.info(session), time.perf_counter() - start)
        self._books.publish(EventKind.PREPARED, session)
        return update.prepared

    def _seal(self, session: Session, timeout: float | None) -> None:
        """Let the open streams end, then take no more chunks."""
        limit = self._books.limits.drain_timeout
        seconds = limit if timeout is None else min(timeout, limit)
        with self._books.lock:
            session.check_open()
            self._books.lock.wait_for(
                lambda: (
                    session.streams == 0
                    or session.state is not SessionState.OPEN
                    or self._books.closing
                ),
                seconds,
            )
            session.check_open()
            if self._books.closing:
                raise SessionStateError(
                    f"session {session.session_id} is dropped, for the worker is stopping; the old"
                    " weights stay",
                    state="aborted",
                )
            if session.streams:
                raise StreamsOpenError(
                    f"{session.streams} streams of session {session.session_id} are still open"
                    f" after {seconds:g} s; end them, then call again",
                    retry_after=1.0,
                )
            session.sealed = True

    def _unseal(self, session: Session) -> None:
        with self._books.lock:
            session.sealed = False
            session.renew(time.monotonic())
            self._wake_reaper()

    def finish(self, session_id: str, timeout: float | None = None) -> CommitReport:
        """Make a session live, between two forward passes, for all its targets together.

        Raises:
            WeightSyncError: as FinishWeightUpdate in the contract.
        """
        with self._books.lock:
            session = self._books.table.get(session_id)
            if session.report is not None:
                return session.report
            if session.failure is not None:
                raise copy(session.failure)
        update = self._books.update(session_id)
        with update.phase:
            if update.session.report is not None:
                return update.session.report
            if update.session.failure is not None:
                raise copy(update.session.failure)
            prepared = self._prepare(update, timeout)
            with self._books.lock:
                # The lease may have run out between the two phases.
                if update.session.state is not SessionState.PREPARED:
                    update.session.check_open()
                update.session.sealed = True
            seconds = self._books.limits.gate_timeout
            return self._commit(
                update, prepared, seconds if timeout is None else min(timeout, seconds)
            )

    def _commit(self, update: Update, prepared: PrepareReport, timeout: float) -> CommitReport:
        session = update.session
        try:
            with (
                self._books.trace.span(
                    "commit", session_id=session.session_id, **facts(session)
                ) as told,
                self._books.reader.change(),
            ):
                outcome = update.commit.run(timeout)
                self._record(update)
                told |= {
                    "receive": update.prepared_at - update.started,
                    "pause": outcome.pause_seconds,
                    "applied_bytes": outcome.applied_bytes,
                }
        except (CommitRolledBackError, CommitFailedError) as error:
            # Without its traceback, whose frames would keep the arena as long as the session is
            # remembered.
            session.failure = copy(error)
            if isinstance(error, CommitFailedError):
                self._books.quarantine(update, str(error))
            self._books.end(update, SessionState.FAILED, str(error))
            raise
        except BaseException:
            self._unseal(session)
            raise
        report = self._report(update, prepared, outcome)
        self._books.end(update, SessionState.COMMITTED)
        return report

    def _record(self, update: Update) -> None:
        session = update.session
        with self._books.lock:
            for block in update.staging.blocks:
                boxes = [box for box, _ in block.written()]
                self._books.models.mark_written(update.plan, block.key, boxes)
            for target in session.request.targets:
                record = self._books.models.records[target]
                record.weight_version = session.request.weight_version
                record.num_commits += 1
                record.last_commit_time = time.time()
                if record.state is TargetState.QUARANTINED:
                    record.state, record.quarantine_reason = TargetState.READY, ""
                    self._books.engine.gate.quarantine(target, None)
                    self._books.trace.told(
                        "quarantine.lifted", session_id=session.session_id, target=target
                    )

    def _report(self, update: Update, prepared: PrepareReport, outcome: Outcome) -> CommitReport:
        session = update.session
        with self._books.lock:
            session.state = SessionState.COMMITTED
            session.report = CommitReport(
                session=self._books.info(session),
                # The session holds them no longer once the caller reads this.
                targets=tuple(
                    replace(status, session_id="")
                    for status in self._books.statuses(session.request.targets)
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
