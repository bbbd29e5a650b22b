"""Sessions: one writer per target, leases, and the rules of who may do what when.

Pure bookkeeping: no bytes, no threads of its own. The owner of a `SessionTable` guards it with
one lock and tells it the time.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass

from weightsync.core.errors import (
    InvalidRequestError,
    RequestIdReusedError,
    SessionExpiredError,
    SessionStateError,
    TargetBusyError,
    UnknownSessionError,
    WeightSyncError,
)
from weightsync.core.types import SessionState, Target, Transport, UpdateRequest
from weightsync.core.views import CommitReport, SessionInfo


@dataclass(slots=True)
class Session:
    """One session.

    Attributes:
        session_id: The worker's name for it.
        request: What was asked for.
        lease: Seconds that it may stay without a write.
        prepared_lease: Seconds that it may stay once it is prepared.
        created: When it was opened, on the table's clock.
        expires: When its lease runs out, on the table's clock.
        state: Where it stands.
        sealed: True while it is being prepared or committed: no chunk, no abort, no expiry.
        transport: The way of its bytes.
        streams: Number of open streams.
        received_bytes: Payload bytes taken, repeats included.
        end_reason: Why it ended, when it was not committed.
        report: What it changed, once it is committed: the answer to a repeated finish.
        failure: Why its commit failed: the same.
    """

    session_id: str
    request: UpdateRequest
    lease: float
    prepared_lease: float
    created: float
    expires: float
    state: SessionState = SessionState.OPEN
    sealed: bool = False
    transport: Transport = Transport.INLINE
    streams: int = 0
    received_bytes: int = 0
    end_reason: str = ""
    report: CommitReport | None = None
    failure: WeightSyncError | None = None

    def check_open(self) -> None:
        """Refuse what only an open session may do.

        Raises:
            SessionExpiredError: its lease ran out.
            SessionStateError: it is prepared, being prepared, or has ended.
        """
        if self.state is SessionState.EXPIRED:
            raise SessionExpiredError(
                f"session {self.session_id} expired: {self.end_reason}; start a new session"
            )
        if self.state is not SessionState.OPEN or self.sealed:
            state = "being finished" if self.sealed else self.state.name
            because = f" ({self.end_reason})" if self.end_reason else ""
            raise SessionStateError(
                f"session {self.session_id} is {state}{because} and takes no more chunks;"
                " start a new session",
                state=self.state.name,
            )

    def renew(self, now: float) -> None:
        """Start the lease anew: that of the state."""
        prepared = self.state is SessionState.PREPARED
        self.expires = now + (self.prepared_lease if prepared else self.lease)

    def info(self, *, wall_offset: float = 0.0, missing_bytes: int = 0) -> SessionInfo:
        """Return what callers see; `wall_offset` turns the table's clock into Unix seconds."""
        return SessionInfo(
            session_id=self.session_id,
            state=self.state,
            targets=self.request.targets,
            scope=self.request.scope,
            mode=self.request.mode,
            weight_version=self.request.weight_version,
            holder=self.request.holder,
            transport=self.transport,
            create_time=self.created + wall_offset,
            expire_time=self.expires + wall_offset,
            received_bytes=self.received_bytes,
            missing_bytes=missing_bytes,
            end_reason=self.end_reason,
        )


class SessionTable:
    """All sessions of a worker, the ended ones for a while."""

    def __init__(self, *, default_lease: float, max_lease: float, max_sessions: int = 256) -> None:
        """Start empty; leases in seconds; `max_sessions` ended ones are remembered."""
        self._max_sessions = max_sessions
        self._default_lease = default_lease
        self._max_lease = max_lease
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._holders: dict[Target, Session] = {}

    def repeated(self, request: UpdateRequest) -> Session | None:
        """Return the session that the same request has opened, if any.

        Raises:
            RequestIdReusedError: the id belongs to another request.
        """
        session_id = self._by_request.get(request.request_id) if request.request_id else None
        if session_id is None:
            return None
        session = self._sessions[session_id]
        if session.request != request:
            raise RequestIdReusedError(
                f"request id {request.request_id!r} opened session {session_id} with other"
                " contents; use a new id for a new request"
            )
        return session

    def open(self, request: UpdateRequest, now: float, *, wall_offset: float = 0.0) -> Session:
        """Open a session, which then holds its targets.

        Raises:
            InvalidRequestError: a lease that is not positive.
            TargetBusyError: another session holds a target.
        """
        lease = self._granted(request.lease, self._default_lease, "lease")
        prepared_lease = self._granted(request.prepared_lease, lease, "prepared_lease")
        for target in sorted(request.targets, key=lambda t: t.value):
            holder = self._holders.get(target)
            if holder is not None:
                raise TargetBusyError(
                    f"the {target} is held by session {holder.session_id} of"
                    f" {holder.request.holder or 'an unnamed holder'} for at most"
                    f" {max(0.0, holder.expires - now):.1f} s more; join that session by its id,"
                    " or try again when it has ended",
                    retry_after=max(0.1, min(holder.expires - now, 5.0)),
                    holder=holder.request.holder,
                    session_id=holder.session_id,
                    expire_time=f"{holder.expires + wall_offset:.3f}",
                )
        session = Session(uuid.uuid4().hex, request, lease, prepared_lease, now, now + lease)
        self._sessions[session.session_id] = session
        if request.request_id:
            self._by_request[request.request_id] = session.session_id
        for target in request.targets:
            self._holders[target] = session
        return session

    def _granted(self, asked: float | None, default: float, field: str) -> float:
        if asked is not None and asked <= 0:
            raise InvalidRequestError(f"{field} must be positive", subjects=[field])
        return min(asked or default, self._max_lease)

    def get(self, session_id: str) -> Session:
        """Return a session.

        Raises:
            UnknownSessionError: there is none, or it ended long ago.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(
                f"this worker has no session {session_id[:64]!r}; it may have been restarted"
                " (compare the instance id), or the session ended long ago",
                subjects=[session_id[:64]],
            )
        return session

    def holder(self, target: Target) -> Session | None:
        """Return the session that holds a target."""
        return self._holders.get(target)

    def open_sessions(self) -> list[Session]:
        """Return those that have not ended."""
        return list({s.session_id: s for s in self._holders.values()}.values())

    def end(self, session: Session, state: SessionState, reason: str = "") -> None:
        """Let a session's targets go; old ended sessions are forgotten."""
        session.state = state
        session.end_reason = reason
        session.sealed = False
        for target in session.request.targets:
            if self._holders.get(target) is session:
                del self._holders[target]
        self._sessions.move_to_end(session.session_id)
        ended = [s for s in self._sessions.values() if s.state.ended]
        for old in ended[: max(0, len(ended) - self._max_sessions)]:
            del self._sessions[old.session_id]
            self._by_request.pop(old.request.request_id, None)

    def forget(self, session: Session) -> None:
        """Take back an `open` that came to nothing: the request id may be used again."""
        self.end(session, SessionState.ABORTED)
        del self._sessions[session.session_id]
        self._by_request.pop(session.request.request_id, None)

    def overdue(self, now: float) -> list[Session]:
        """Return the sessions whose lease has run out and that are not being finished."""
        return [s for s in self.open_sessions() if not s.sealed and s.expires <= now]

    def next_expiry(self) -> float | None:
        """Return when the next lease runs out, if any session can expire."""
        return min((s.expires for s in self.open_sessions() if not s.sealed), default=None)
