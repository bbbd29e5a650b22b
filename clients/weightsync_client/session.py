"""A session over one or many workers: push, then finish or abort."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from weightsync.core.errors import InvalidRequestError, SessionStateError, UnsupportedError
from weightsync.core.trace import Trace
from weightsync.core.types import Target, UpdateRequest
from weightsync_client.carrier import Carrier
from weightsync_client.chunker import Chunker, Message
from weightsync_client.forks import process
from weightsync_client.member import Member, SendOptions
from weightsync_client.names import NameMapping
from weightsync_client.phases import abort_all, concurrently, finish_all, first_error, prepare_all
from weightsync_client.placer import Placer
from weightsync_client.planner import Planner, Rows
from weightsync_client.progress import Meter, Progress
from weightsync_client.report import FleetError, FleetReport, Outcome
from weightsync_client.router import Router, Workers
from weightsync_client.sources import Source, is_stable, shards

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Ticket:
    """What another process needs to join a session; picklable.

    Attributes:
        request: What the session was asked for.
        session_ids: One per worker, in the fleet's order.
    """

    request: UpdateRequest
    session_ids: tuple[str, ...]


class Session:
    """Weights on their way; made by `Fleet.update` and `Fleet.join`.

    As a context manager it finishes when the block ends well and aborts when the block raises. A
    process that joined only waits until its part has arrived: the one that opened the session
    finishes it, once it knows that all others are done. To be used by one thread.
    """

    def __init__(
        self,
        members: Sequence[Member],
        request: UpdateRequest,
        *,
        trace: Trace,
        joined: bool,
        commit: Callable[[UpdateRequest, Sequence[str]], object] | None,
        names: NameMapping,
        rows: Rows,
        options: SendOptions,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        """Take the open sessions of all workers."""
        self._members = tuple(members)
        self._request = request
        self._trace = trace
        self._joined = joined
        self._commit = commit
        self._names = names
        self._report: FleetReport | None = None
        self._ended = ""
        planner = Planner([member.needs for member in members], request, rows)
        self._meter = Meter(progress, None if joined else planner.total_bytes())
        # One message must fit all workers that it may go to.
        max_payload = min(member.limits.max_payload_bytes for member in members)
        self._max_payload = min(options.chunk_bytes or max_payload, max_payload)
        self._max_segments = min(member.limits.max_segments for member in members)
        self._checksum = options.checksum
        self._router = Router(
            planner,
            request.ignore_names,
            self._carrier,
            self._emit,
            alone=[i for i, member in enumerate(members) if member.arena is not None],
        )

    def __repr__(self) -> str:
        state = self._ended or "open"
        return f"Session({self._request.weight_version!r}, {len(self._members)} workers, {state})"

    @property
    def ticket(self) -> Ticket:
        """What other processes join with."""
        return Ticket(self._request, tuple(member.session_id for member in self._members))

    @property
    def report(self) -> FleetReport:
        """What the update came to.

        Raises:
            SessionStateError: it is not finished.
        """
        if self._report is None:
            raise SessionStateError(f"{self!r} is not finished", state=self._ended or "open")
        return self._report

    def allocate(
        self, names: Collection[str] | None = None, *, target: Target | None = None
    ) -> dict[str, torch.Tensor]:
        """Return tensors that lie in the worker's arena: who computes into them copies nothing.

        Push them like any others when they are written. They are for this session only: behind its
        end they hold whatever the worker leaves there.

        Args:
            names: The worker's names; None: of all tensors that the worker holds whole.
            target: The model; may be left out if the session has one only.

        Raises:
            UnsupportedError: the session has several workers, or its bytes come another way; or a
                named tensor is not held whole.
            UnknownTensorError: a named tensor can't be placed.
        """
        from weightsync_client.allocate import allocate  # noqa: PLC0415 - only here torch is needed

        self._check_open()
        arenas = [member.arena for member in self._members]
        if len(arenas) != 1 or arenas[0] is None:
            raise UnsupportedError(
                "only a session with one worker, on this host and with shared memory, has an arena"
                " to compute into; push from memory of your own"
            )
        return allocate(arenas[0], self._target(target), names)

    def push(
        self,
        source: Source,
        *,
        target: Target | None = None,
        names: NameMapping | None = None,
    ) -> None:
        """Send what the workers need of a source. Its memory may be reused when this returns.

        Args:
            source: See `weightsync_client.sources`.
            target: The model that it belongs to; may be left out if the session has one only.
            names: How its names become the workers'; None: as the session was opened with.

        Raises:
            WeightSyncError: see `Router.route` and the contract's UpdateWeights; what was sent
                before stays in the session, which should be aborted.
        """
        self._check_open()
        model = self._target(target)
        stable = is_stable(source)
        with self._trace.span("push", target=model, **facts(self._request)):
            for shard in shards(source):
                self._router.route(shard, model, names or self._names)
                if not stable:
                    self._router.own()
            self._router.own()

    def settle(self) -> None:
        """Wait until the workers have all that was pushed.

        Raises:
            WeightSyncError: what a worker refused, or that it can't be reached.
        """
        process.check()
        with self._trace.span("settle", **facts(self._request)):
            self._router.flush()
            error = first_error(concurrently(Member.settle, self._members))
            if error is not None:
                raise error

    def finish(self, commit: Callable[[Sequence[str]], object] | None = None) -> FleetReport:
        """Commit on all workers: prepare everywhere, then finish everywhere.

        May be called again after a `FleetError`: workers that have committed are left alone.

        Args:
            commit: Lets an engine commit the sessions itself, whose ranks must do so together;
                called with their ids, by worker, when all are prepared. None: as the fleet does.

        Raises:
            WeightSyncError: no worker has committed; all were aborted and keep what they hold. Or,
                with one worker, it can't be reached to tell.
            FleetError: some workers have committed, others have not.
            Exception: what `commit` raised; no worker has committed, all sessions were aborted.
        """
        if self._report is not None and self._report.committed:
            return self._report
        process.check()
        failure: Exception | None = None
        if self._ended != "finishing":
            self._check_open()
            try:
                self.settle()
                with self._trace.span("prepare", **facts(self._request)):
                    prepare_all(self._members)
                if commit is not None or self._commit is not None:
                    failure = self._let_commit(commit)
            except BaseException as cause:
                self.abort(f"not ready: {cause}")
                raise
            self._ended = "finishing"
        with self._trace.span("finish", **facts(self._request)):
            errors = finish_all(self._members)
        workers = [m.report(e) for m, e in zip(self._members, errors, strict=True)]
        self._report = FleetReport(
            weight_version=self._request.weight_version,
            workers=tuple(workers),
            sent_tensors=len(self._router.sent.tensors),
            sent_bytes=self._meter.bytes_done,
            ignored_names=tuple(sorted(self._router.sent.ignored)),
            seconds=self._meter.seconds,
        )
        # A lost answer may have been a commit all the same: the report has asked.
        error = first_error(errors)
        if error is None or self._report.committed:
            self._end("committed")
            return self._report
        if all(worker.outcome is Outcome.NOT_COMMITTED for worker in workers):
            # Nobody waits for the second phase of a commit that nobody has made.
            self._end("aborted", str(error))
            abort_all(self._members, f"not committed: {error}")
            raise failure or error
        if len(self._members) == 1:
            self._tell_end("unknown", str(error))
            raise failure or error
        self._tell_end("mixed", str(error))
        raise FleetError(self._report) from failure or error

    def _let_commit(self, commit: Callable[[Sequence[str]], object] | None) -> Exception | None:
        session_ids = self.ticket.session_ids
        try:
            if commit is not None:
                commit(session_ids)
            elif self._commit is not None:
                self._commit(self._request, session_ids)
        except Exception as failure:  # noqa: BLE001 - of an engine
            # Its answer may be lost, and the commit be made. What is aborted can't happen any more.
            abort_all(self._members, f"not committed: {failure}")
            return failure
        return None

    def abort(self, cause: str = "") -> None:
        """Drop the session on all workers, which keep what they hold. Idempotent."""
        process.check()
        if not self._ended:
            self._end("aborted", cause)
            abort_all(self._members, cause)

    def _end(self, state: str, reason: str = "") -> None:
        self._ended = state
        self._tell_end(state, reason)

    def _tell_end(self, outcome: str, reason: str = "") -> None:
        self._trace.told("session.ended", outcome=outcome, reason=reason, **facts(self._request))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            # In a forked child it is the parent's, which goes on with it.
            if not process.is_crippled:
                self.abort(f"{kind.__name__}: {error}"[:200])
        elif not self._ended:
            if self._joined:
                self.settle()
                self._tell_end("settled")
            else:
                self.finish()

    def _check_open(self) -> None:
        process.check()
        if self._ended:
            raise SessionStateError(f"{self!r} takes nothing more", state=self._ended)

    def _target(self, target: Target | None) -> Target:
        targets = self._request.targets
        if target is None and len(targets) == 1:
            return next(iter(targets))
        if target not in targets:
            named = ", ".join(sorted(map(str, targets)))
            raise InvalidRequestError(
                f"the session writes {named}: say which of them a source belongs to",
                subjects=["target"],
            )
        return target

    def _carrier(self, workers: Workers, emit: Callable[[Message], None]) -> Carrier:
        inline = Chunker(
            emit,
            max_payload_bytes=self._max_payload,
            max_segments=self._max_segments,
            checksum=self._checksum,
        )
        arena = self._members[workers[0]].arena
        if arena is None:
            return inline
        return Placer(emit, arena, inline, max_segments=self._max_segments)

    def _emit(self, workers: Workers, message: Message, first: bool) -> None:  # noqa: FBT001
        nbytes = message.payload_bytes + message.placed_bytes
        self._trace("message", workers=len(workers), nbytes=nbytes)
        for index in workers:
            self._members[index].send(message)
        self._meter.count(message.segments[-1].key, nbytes if first else 0)


def facts(request: UpdateRequest) -> dict[str, object]:
    """Return what every step tells of its session, by the worker's words."""
    return {
        "request_id": request.request_id,
        "targets": sorted(str(target) for target in request.targets),
        "weight_version": request.weight_version,
        "holder": request.holder,
    }
