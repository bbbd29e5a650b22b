"""Many workers that are to hold the same version."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from weightsync.core.errors import InvalidRequestError, WeightSyncError
from weightsync.core.trace import Trace
from weightsync.core.types import (
    CastPolicy,
    Scope,
    SharedTensorPolicy,
    Target,
    UpdateMode,
    UpdateRequest,
)
from weightsync_client.credentials import Credentials
from weightsync_client.member import Member, SendOptions
from weightsync_client.names import NameMapping
from weightsync_client.phases import concurrently, first_error
from weightsync_client.planner import Rows
from weightsync_client.progress import Progress
from weightsync_client.session import Session, Ticket, facts
from weightsync_client.vllm import Commit, FoundEngine, check_ranks, find
from weightsync_client.worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Self

Targets: TypeAlias = "Target | str | Iterable[Target | str]"


class Fleet:
    """Workers that are updated together: on all of them, or, up to a lost machine, on none.

    Attributes:
        workers: In the order in which reports name them.
        trace: Told of each step of each session.
    """

    def __init__(
        self,
        workers: Iterable[Worker | str],
        *,
        credentials: Credentials | None = None,
        trace: Trace | None = None,
        commit: Commit | None = None,
    ) -> None:
        """Name the workers, by address or connection.

        Args:
            workers: Those that are to hold the same version.
            credentials: Certificates and token for those that are named by address.
            trace: Told of each step of each session, see `CLIENT_STEPS`.
            commit: Lets the workers' engine commit sessions itself, where they must switch in one
                call; None: each worker commits its own.

        Raises:
            InvalidRequestError: none is named, or one twice.
        """
        self._commit = commit
        self.trace = trace or Trace()
        self._credentials = credentials
        self._opened: list[Worker] = []
        self.workers: tuple[Worker, ...] = tuple(map(self._worker, workers))
        addresses = [worker.address for worker in self.workers]
        if not addresses or len(set(addresses)) != len(addresses):
            self.close()
            raise InvalidRequestError(
                f"a fleet needs at least one worker, and each once; got {addresses}",
                subjects=["workers"],
            )

    @classmethod
    def from_vllm(
        cls,
        where: str | Path | FoundEngine,
        timeout: float = 60.0,
        *,
        api_key: str | None = None,
        credentials: Credentials | None = None,
    ) -> Self:
        """Name all ranks of a vLLM that runs the service.

        With a server's URL, or an engine, sessions are committed by its own calls, which several
        ranks need; with a directory `Session.finish` must be given what does that.

        Args:
            where: The URL of its server; or what stands for an engine that can be called, see
                `weightsync.integrations.vllm.clients`; or the `directory` that it was given, in
                which its ranks say how to reach them.
            timeout: Seconds to wait for a vLLM that is still loading.
            api_key: What the server was given as `--api-key`.
            credentials: Certificates and token, if the ranks want any.

        Raises:
            EngineUnavailableError: vLLM, or not all of its ranks, have answered by then.
            UnsupportedError: a server without the routes or the backend.
            UnauthenticatedError: the server wants another `api_key`.
            InvalidRequestError: another service has taken the address of a rank that is gone; or
                a rank listens where only its own host can reach it.
            ConnectionLostError: a rank does not answer.
        """
        ranks, commit = find(where, timeout, api_key)
        addresses = [rank.address for rank in ranks]
        fleet = cls(addresses, credentials=credentials, commit=commit)
        try:
            check_ranks(ranks, fleet.workers)
        except BaseException:
            fleet.close()
            raise
        return fleet

    def _worker(self, worker: Worker | str) -> Worker:
        if isinstance(worker, Worker):
            return worker
        self._opened.append(Worker(worker, credentials=self._credentials))
        return self._opened[-1]

    def update(
        self,
        *,
        version: str,
        target: Targets = Target.VERIFIER,
        scope: Scope = Scope.FULL,
        mode: UpdateMode = UpdateMode.STAGED,
        expected_base_versions: Mapping[Target, str] | None = None,
        lease: float | None = None,
        prepared_lease: float | None = None,
        shared_tensors: SharedTensorPolicy = SharedTensorPolicy.REFUSE,
        cast: CastPolicy = CastPolicy.REFUSE,
        ignore_names: Sequence[str] = (),
        check_finite: bool = False,
        holder: str = "",
        names: NameMapping | None = None,
        rows: Rows = "equal",
        options: SendOptions | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Session:
        """Open a session on all workers.

        Args:
            version: What the targets will hold.
            target: The model or models that are written.
            scope: All of them, or a part.
            mode: Staged, or in place.
            expected_base_versions: What the targets must hold now.
            lease: Seconds that the session may stay without a write; None: the workers' default.
            prepared_lease: Seconds that a prepared session may wait for the others, should this
                client be lost between the two phases; None: the lease.
            shared_tensors: For a draft's tensors that are one storage with the verifier's.
            cast: For element types that differ.
            ignore_names: Patterns of names that may be pushed though no worker has them.
            check_finite: Refuse to commit NaN and infinity.
            holder: Who is asking, for people; empty: host and process.
            names: How the source's names become the workers'.
            rows: Whether first dimensions may differ, for padded vocabularies.
            options: How bytes travel.
            progress: Called after each message.

        Raises:
            WeightSyncError: a worker refused, see StartWeightUpdate; none keeps a session.
        """
        request = UpdateRequest(
            targets=parse_targets(target),
            scope=scope,
            weight_version=version,
            request_id=str(uuid.uuid4()),
            expected_base_versions=tuple((expected_base_versions or {}).items()),
            mode=mode,
            transports=(options or SendOptions()).transports,
            lease=lease,
            prepared_lease=prepared_lease,
            shared_tensors=shared_tensors,
            cast=cast,
            ignore_names=tuple(ignore_names),
            check_finite=check_finite,
            holder=holder or f"{socket.gethostname()}:{os.getpid()}",
        )
        with self._begun(request), self.trace.span("start", **facts(request)):
            return self._open(request, names=names, rows=rows, options=options, progress=progress)

    def _open(
        self,
        request: UpdateRequest,
        *,
        names: NameMapping | None,
        rows: Rows,
        options: SendOptions | None,
        progress: Callable[[Progress], None] | None,
    ) -> Session:
        started = concurrently(lambda worker: worker.start(request), self.workers)
        open_here = [
            (worker, info.session_id)
            for worker, info in zip(self.workers, started, strict=True)
            if not isinstance(info, WeightSyncError)
        ]
        with contextlib.ExitStack() as failing:
            failing.callback(_abort_all, open_here)
            _raise_first(started)
            session = self._session(
                Ticket(request, tuple(session_id for _, session_id in open_here)),
                joined=False,
                missing_only=False,
                names=names,
                rows=rows,
                options=options,
                progress=progress,
            )
            failing.pop_all()
        return session

    def join(
        self,
        ticket: Ticket,
        *,
        missing_only: bool = False,
        names: NameMapping | None = None,
        rows: Rows = "equal",
        options: SendOptions | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Session:
        """Join sessions that another process, or an earlier one, has opened on the same workers.

        Args:
            ticket: `Session.ticket` of the session.
            missing_only: Send only what the workers miss by now: to go on after a crash.
            names: As for `update`.
            rows: As for `update`.
            options: As for `update`.
            progress: As for `update`.

        Raises:
            WeightSyncError: a worker can't be reached, or does not know its session.
        """
        if len(ticket.session_ids) != len(self.workers):
            raise InvalidRequestError(
                f"the ticket is for {len(ticket.session_ids)} workers, the fleet has "
                f"{len(self.workers)}",
                subjects=["ticket"],
            )
        with self._begun(ticket.request):
            return self._session(
                ticket,
                joined=True,
                missing_only=missing_only,
                names=names,
                rows=rows,
                options=options,
                progress=progress,
            )

    @contextlib.contextmanager
    def _begun(self, request: UpdateRequest) -> Iterator[None]:
        """Tell of a session that is opened or joined within; its end is told by itself."""
        self.trace.told("session.started", **facts(request))
        try:
            yield
        except BaseException as error:
            self.trace.told("session.ended", outcome="refused", reason=str(error), **facts(request))
            raise

    def _session(
        self,
        ticket: Ticket,
        *,
        joined: bool,
        missing_only: bool,
        names: NameMapping | None,
        rows: Rows,
        options: SendOptions | None,
        progress: Callable[[Progress], None] | None,
    ) -> Session:
        options = options or SendOptions()

        def member(place: tuple[Worker, str]) -> Member:
            worker, session_id = place
            found = Member(worker, session_id, ticket.request, options, self.trace)
            if missing_only and ticket.request.scope is Scope.FULL:
                found.needs.restrict(worker.missing(session_id))
            return found

        places = list(zip(self.workers, ticket.session_ids, strict=True))
        members = concurrently(member, places)
        _raise_first(members)
        return Session(
            [m for m in members if isinstance(m, Member)],
            ticket.request,
            trace=self.trace,
            joined=joined,
            commit=self._commit,
            names=names or NameMapping(),
            rows=rows,
            options=options,
            progress=progress,
        )

    def add(self, worker: Worker | str) -> Worker:
        """Add a worker that came late to all later updates, and return its connection.

        Raises:
            InvalidRequestError: it is there already.
        """
        address = worker if isinstance(worker, str) else worker.address
        if address in [known.address for known in self.workers]:
            raise InvalidRequestError(f"{address} is in the fleet already", subjects=["worker"])
        self.workers = (*self.workers, added := self._worker(worker))
        return added

    def part(self, workers: Sequence[Worker]) -> Fleet:
        """Return a fleet of some of these workers; of all if their engine commits all at once."""
        if self._commit is not None:
            return self
        return Fleet(workers, trace=self.trace)

    def close(self) -> None:
        """Close the connections that were opened here."""
        for worker in self._opened:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise_first(results: Sequence[object]) -> None:
    error = first_error(results)
    if error is not None:
        raise error


def _abort_all(sessions: Iterable[tuple[Worker, str]]) -> None:
    for worker, session_id in sessions:
        # The error that brought us here says more than another one could.
        with contextlib.suppress(WeightSyncError):
            worker.abort(session_id, "the session could not be opened on all workers")


def parse_targets(target: Targets) -> frozenset[Target]:
    """Return the targets that are meant by one or more of them, or of their names.

    Raises:
        InvalidRequestError: a name is neither `verifier` nor `draft`.
    """
    named = [target] if isinstance(target, Target | str) else list(target)
    try:
        return frozenset(t if isinstance(t, Target) else Target[t.upper()] for t in named)
    except KeyError as error:
        raise InvalidRequestError(
            f"there is no target {error}: say 'verifier' or 'draft'", subjects=["target"]
        ) from None
