"""Who may do what when: one writer, repeated calls, leases, races."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.worker.feeding import all_pieces, fresh, push, request, send, state, unchanged
from weightsync.core.errors import (
    BaseVersionMismatchError,
    DrainingError,
    InvalidRequestError,
    RequestIdReusedError,
    SessionExpiredError,
    SessionStateError,
    StreamsOpenError,
    TargetAbsentError,
    TargetBusyError,
    TooManyStreamsError,
    UnknownSessionError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.core.types import Limits, Scope, SessionState, Target
from weightsync.core.views import CommitReport, EventKind
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import Tiny, tiny_pair

VERIFIER, DRAFT = Target.VERIFIER, Target.DRAFT


def wait_for(worker: Worker, kind: EventKind, seconds: float = 20) -> None:
    """Wait for an event from now on, or one that just happened."""
    events = worker.watch(1)
    while (event := events.next(seconds)) is not None:
        if event.kind is kind:
            events.close()
            return
    raise AssertionError(f"no {kind}")


def test_one_writer_per_target(worker: Worker) -> None:
    """A second start is refused at once and told who holds the target and until when (B55)."""
    session = worker.start(request(holder="trainer-7"))
    with pytest.raises(TargetBusyError, match="trainer-7") as caught:
        worker.start(request(VERIFIER, DRAFT))
    assert caught.value.metadata["session_id"] == session.session_id
    assert float(caught.value.metadata["expire_time"]) == pytest.approx(session.expire_time, abs=1)
    assert caught.value.retry_after
    other = worker.start(request(DRAFT, version="d"))
    worker.abort(session.session_id)
    worker.start(request())
    assert worker.update(other.session_id).state is SessionState.OPEN


def test_a_repeated_start_returns_the_same_session(worker: Worker) -> None:
    """The same request id with the same contents is one session, with others an error."""
    first = worker.start(request(request_id="r1"))
    assert worker.start(request(request_id="r1")).session_id == first.session_id
    with pytest.raises(RequestIdReusedError):
        worker.start(request(request_id="r1", version="other"))


def test_a_start_that_failed_leaves_its_request_id_free(models: tuple[Tiny, Tiny]) -> None:
    """After a refusal the same request may be tried again."""
    worker = Worker(ModuleEngine(*models))
    holder = worker.start(request())
    with pytest.raises(TargetBusyError):
        worker.start(request(request_id="again"))
    worker.abort(holder.session_id)
    assert worker.start(request(request_id="again")).state is SessionState.OPEN
    worker.close()


def test_finish_and_abort_are_idempotent(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A second finish gives the first one's report; a second abort changes nothing."""
    verifier, _ = models
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, fresh(verifier.state_dict()))
    report = worker.finish(session.session_id)
    assert worker.finish(session.session_id) == report
    with pytest.raises(SessionStateError, match="committed"):
        worker.abort(session.session_id)
    dropped = worker.start(request(version="v2"))
    assert worker.abort(dropped.session_id, "why not").end_reason == "why not"
    assert worker.abort(dropped.session_id).end_reason == "why not"
    with pytest.raises(SessionStateError):
        worker.finish(dropped.session_id)


def test_no_chunk_after_the_end(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A prepared, committed or aborted session takes no chunks, and says in which state it is."""
    verifier, _ = models
    new = fresh(verifier.state_dict())
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, new)
    worker.prepare(session.session_id)
    with pytest.raises(SessionStateError, match="PREPARED"):
        push(worker, session.session_id, VERIFIER, new)
    worker.finish(session.session_id)
    with pytest.raises(SessionStateError, match="COMMITTED"):
        push(worker, session.session_id, VERIFIER, new)


def test_an_open_stream_of_an_aborted_session_is_refused_at_its_next_chunk(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """Abort does not wait for streams, and nothing they send later is kept."""
    verifier, _ = models
    before = state(verifier)
    session = worker.start(request())
    with worker.stream(session.session_id):
        worker.abort(session.session_id)
        with pytest.raises(SessionStateError, match="ABORTED"):
            send(
                worker,
                session.session_id,
                [all_pieces(VERIFIER, fresh(verifier.state_dict()))],
            )
    assert worker.staging_bytes == 0
    assert unchanged(verifier, before)


def test_a_lease_that_runs_out_frees_the_target(models: tuple[Tiny, Tiny]) -> None:
    """A trainer that goes silent loses its session; the next one gets the target (B56)."""
    verifier, _ = models
    before = state(verifier)
    worker = Worker(ModuleEngine(*models))
    session = worker.start(request(lease=0.05))
    wait_for(worker, EventKind.EXPIRED)
    assert worker.update(session.session_id).state is SessionState.EXPIRED
    with pytest.raises(SessionExpiredError, match=r"0\.05 s"):
        push(worker, session.session_id, VERIFIER, before)
    with pytest.raises(SessionExpiredError):
        worker.finish(session.session_id)
    assert worker.staging_bytes == 0
    new = fresh(verifier.state_dict())
    session = worker.start(request(version="v2"))
    push(worker, session.session_id, VERIFIER, new)
    worker.finish(session.session_id)
    assert unchanged(verifier, new)
    worker.close()


def test_a_prepared_session_expires_too(models: tuple[Tiny, Tiny]) -> None:
    """A coordinator that dies between the two phases leaves no worker stuck (B61, B63)."""
    verifier, _ = models
    before = state(verifier)
    worker = Worker(ModuleEngine(*models))
    session = worker.start(request(lease=0.3))
    push(worker, session.session_id, VERIFIER, fresh(verifier.state_dict()))
    worker.prepare(session.session_id)
    wait_for(worker, EventKind.EXPIRED)
    assert unchanged(verifier, before)
    with pytest.raises(SessionExpiredError):
        worker.finish(session.session_id)
    worker.close()


def test_a_prepared_session_has_a_lease_of_its_own(models: tuple[Tiny, Tiny]) -> None:
    """A caller decides how long a prepared session waits for its other workers (B61)."""
    verifier, _ = models
    worker = Worker(ModuleEngine(*models), limits=Limits(max_lease=1000))
    session = worker.start(request(lease=5, prepared_lease=1e9))
    assert session.expire_time - session.create_time == pytest.approx(5, abs=0.5)
    push(worker, session.session_id, VERIFIER, fresh(verifier.state_dict()))
    prepared = worker.prepare(session.session_id).session
    assert prepared.expire_time - prepared.create_time == pytest.approx(1000, abs=30)
    worker.abort(session.session_id)
    session = worker.start(request(lease=1000, prepared_lease=0.05))
    push(worker, session.session_id, VERIFIER, fresh(verifier.state_dict()))
    worker.prepare(session.session_id)
    wait_for(worker, EventKind.EXPIRED)
    with pytest.raises(SessionExpiredError, match="nobody finished it"):
        worker.finish(session.session_id)
    worker.close()


def test_leases_are_bounded_by_the_worker(models: tuple[Tiny, Tiny]) -> None:
    """A caller can't hold a target longer than the worker allows, nor for no time at all."""
    worker = Worker(ModuleEngine(*models), limits=Limits(max_lease=5))
    session = worker.start(request(lease=1e9))
    assert session.expire_time - session.create_time == pytest.approx(5, abs=0.5)
    with pytest.raises(InvalidRequestError, match="lease"):
        worker.start(request(DRAFT, lease=-1.0))
    worker.close()


def test_prepare_waits_for_open_streams(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """Finish comes after the pushes that are under way; one that never ends is named (B62)."""
    verifier, _ = models
    new = fresh(verifier.state_dict())
    session = worker.start(request())
    entered, go_on = threading.Event(), threading.Event()

    def slow_push() -> None:
        with worker.stream(session.session_id):
            entered.set()
            go_on.wait(30)
            push(worker, session.session_id, VERIFIER, new)

    with ThreadPoolExecutor() as pool:
        pushing = pool.submit(slow_push)
        entered.wait(30)
        with pytest.raises(StreamsOpenError, match="1 streams"):
            worker.prepare(session.session_id, timeout=0.05)
        finishing = pool.submit(worker.finish, session.session_id)
        go_on.set()
        finishing.result(30)
        pushing.result(30)
    assert unchanged(verifier, new)


def test_status_answers_while_a_commit_waits(models: tuple[Tiny, Tiny]) -> None:
    """Nothing but the commit itself waits for a step boundary."""
    verifier, _ = models
    engine = ModuleEngine(verifier)
    worker = Worker(engine)
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, fresh(verifier.state_dict()))
    with ThreadPoolExecutor() as pool:
        engine.gate.pause("test", 1)
        engine.gate.resume("test")
        held, release = threading.Event(), threading.Event()

        def step() -> None:
            with engine.gate.step(VERIFIER):
                held.set()
                release.wait(30)

        stepping = pool.submit(step)
        held.wait(30)
        finishing = pool.submit(worker.finish, session.session_id)
        wait_for(worker, EventKind.PREPARED)
        assert worker.info().targets[0].session_id == session.session_id
        assert worker.update(session.session_id).missing_bytes == 0
        assert worker.missing(session.session_id, 0, 10) == ([], None)
        release.set()
        stepping.result(30)
        assert isinstance(finishing.result(30), CommitReport)
    worker.close()


def test_exactly_one_of_two_starts_wins(worker: Worker) -> None:
    """Two trainers at the same moment, fifty times: one session, one clear refusal (B57)."""
    with ThreadPoolExecutor(2) as pool:
        for step in range(50):
            barrier = threading.Barrier(2)

            def start(who: str, barrier: threading.Barrier = barrier, step: int = step) -> str:
                barrier.wait(30)
                try:
                    return worker.start(request(holder=who, version=str(step))).session_id
                except TargetBusyError as error:
                    return f"busy: {error.metadata['holder']}"

            answers = list(pool.map(start, ("a", "b")))
            refused = [answer for answer in answers if answer.startswith("busy")]
            (session_id,) = set(answers) - set(refused)
            assert refused == [f"busy: {worker.update(session_id).holder}"]
            worker.abort(session_id)


def test_two_finishes_at_once_give_one_commit(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """However many call finish together, there is one commit, and all get its report."""
    verifier, _ = models
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, fresh(verifier.state_dict()))
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(worker.finish, [session.session_id] * 4))
    assert len({id(report) for report in reports}) == 1
    assert worker.info().targets[0].num_commits == 1


def test_a_worker_without_a_draft_refuses_draft_sessions() -> None:
    """No draft, or a drafter without weights: a clear refusal, never another target (B03, B04)."""
    verifier = Tiny()
    before = state(verifier)
    worker = Worker(ModuleEngine(verifier))
    for targets in ((DRAFT,), (VERIFIER, DRAFT)):
        with pytest.raises(TargetAbsentError, match="draft"):
            worker.start(request(*targets))
    assert unchanged(verifier, before)
    worker.close()


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"version": ""}, InvalidRequestError),
        ({"transports": ()}, UnsupportedError),
        ({"ignore_names": ("",)}, InvalidRequestError),
        ({"expected_base_versions": ((VERIFIER, "v0"),)}, BaseVersionMismatchError),
    ],
)
def test_a_request_that_can_not_be_met(
    worker: Worker, more: dict[str, object], error: type[WeightSyncError]
) -> None:
    """A bad request opens nothing."""
    with pytest.raises(error):
        worker.start(request(**more))  # type: ignore[arg-type]
    assert worker.info().targets[0].session_id == ""
    assert worker.staging_bytes == 0


def test_the_expected_base_version_is_checked(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """An update that is based on what the target holds is taken, any other is refused."""
    verifier, _ = models
    for base, version in (("", "v1"), ("v1", "v2")):
        session = worker.start(request(version=version, expected_base_versions=((VERIFIER, base),)))
        push(worker, session.session_id, VERIFIER, fresh(verifier.state_dict()))
        worker.finish(session.session_id)
    with pytest.raises(BaseVersionMismatchError, match="'v2', not 'v1'"):
        worker.start(request(expected_base_versions=((VERIFIER, "v1"),)))


def test_unknown_sessions_are_named(worker: Worker) -> None:
    """Every call that names a session that is not there says so."""
    calls = (worker.update, worker.prepare, worker.finish, worker.abort)
    for call in calls:
        with pytest.raises(UnknownSessionError, match="nope"):
            call("nope")
    with pytest.raises(UnknownSessionError), worker.stream("nope"):
        pass


def test_streams_are_bounded(models: tuple[Tiny, Tiny]) -> None:
    """One stream more than allowed is refused at once; control calls are not concerned (B81)."""
    worker = Worker(ModuleEngine(*models), limits=Limits(max_streams=1))
    session = worker.start(request())
    with worker.stream(session.session_id):
        with pytest.raises(TooManyStreamsError), worker.stream(session.session_id):
            pass
        assert worker.update(session.session_id).state is SessionState.OPEN
    worker.close()


def test_a_closing_worker_drops_what_is_open(models: tuple[Tiny, Tiny]) -> None:
    """Close aborts open sessions, keeps the weights, and takes no new sessions."""
    verifier, _ = models
    before = state(verifier)
    worker = Worker(ModuleEngine(*models))
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, fresh(verifier.state_dict()))
    worker.close()
    assert worker.update(session.session_id).state is SessionState.ABORTED
    assert unchanged(verifier, before)
    assert not worker.serving
    with pytest.raises(DrainingError):
        worker.start(request())


def test_a_closing_worker_waits_for_a_session_that_is_finishing() -> None:
    """Within its grace a draining worker lets an open session commit."""
    verifier, draft = tiny_pair()
    worker = Worker(ModuleEngine(verifier, draft))
    new = fresh(verifier.state_dict())
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, new)
    with ThreadPoolExecutor() as pool:
        worker.drain()
        closing = pool.submit(worker.close, 30)
        worker.finish(session.session_id)
        closing.result(30)
    assert unchanged(verifier, new)


def test_the_missing_list_is_paged(worker: Worker) -> None:
    """Pages, one after the other, are the whole list, each tensor once per storage."""
    session = worker.start(request(VERIFIER, DRAFT))
    names: list[str] = []
    start: int | None = 0
    while start is not None:
        page, start = worker.missing(session.session_id, start, 3)
        assert len(page) <= 3
        names += [str(m.target) + ":" + m.name for m in page]
    assert len(names) == len(set(names)) == 12
    assert "draft:embed.weight" not in names


def test_partial_sessions_report_what_they_began(worker: Worker) -> None:
    """For PARTIAL, missing is what announced regions still lack; nothing else."""
    session = worker.start(request(scope=Scope.PARTIAL))
    run = all_pieces(VERIFIER, {"fc.weight": torch.zeros(4, 4)}, cut=32)
    send(worker, session.session_id, [run[:1]])
    (missing,), rest = worker.missing(session.session_id, 0, 10)
    assert rest is None
    assert (missing.name, missing.missing_bytes) == ("fc.weight", 32)
