"""IN_PLACE: no arena, generation held from start to end, quarantine instead of rollback."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.worker.feeding import all_pieces, fresh, push, request, same_bits, send, state, unchanged
from weightsync.core.errors import (
    CommitFailedError,
    IncompleteError,
    QuarantinedError,
    UnsupportedError,
    VersionChangedError,
)
from weightsync.core.types import Scope, SharedTensorPolicy, Target, TargetState, UpdateMode
from weightsync.core.views import EventKind
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import Tiny, tiny_pair

IN_PLACE = UpdateMode.IN_PLACE
TOKENS = torch.arange(10)


def heal(worker: Worker, verifier: Tiny) -> None:
    """Run a FULL session that must make the verifier serve again."""
    new = fresh(verifier.state_dict(), 9)
    session = worker.start(request(version="healed"))
    push(worker, session.session_id, Target.VERIFIER, new)
    worker.finish(session.session_id)
    assert unchanged(verifier, new)
    verifier(TOKENS)


def test_bytes_go_straight_into_live_weights(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """No arena byte is used, and pieces of 7 bytes land right, in non-contiguous weights too."""
    verifier, _ = models
    verifier.fc.weight.data = torch.zeros(4, 4).t()
    new = fresh(verifier.state_dict())
    session = worker.start(request(mode=IN_PLACE))
    run = all_pieces(Target.VERIFIER, new, cut=7)
    send(worker, session.session_id, [[piece] for piece in run])
    assert worker.staging_bytes == 0
    assert unchanged(verifier, new)
    report = worker.finish(session.session_id)
    assert report.applied_bytes == sum(t.nbytes for t in new.values())
    assert worker.info().targets[0].weight_version == "v1"
    verifier(TOKENS)


def test_generation_is_held_from_start_to_end() -> None:
    """A forward that begins during the session ends after it, with the new weights (B61)."""
    verifier, draft = tiny_pair()
    worker = Worker(ModuleEngine(verifier, draft))
    new = fresh(verifier.state_dict())
    session = worker.start(request(mode=IN_PLACE))
    begun = threading.Event()

    def forward() -> torch.Tensor:
        begun.set()
        logits: torch.Tensor = verifier(TOKENS)
        return logits

    with ThreadPoolExecutor() as pool:
        answer = pool.submit(forward)
        begun.wait(30)
        push(worker, session.session_id, Target.VERIFIER, new)
        assert not answer.done()
        worker.finish(session.session_id)
        got = answer.result(30)
    assert same_bits(got, verifier(TOKENS))
    worker.close()


@pytest.mark.parametrize("end", ["abort", "expiry"])
def test_a_session_that_does_not_finish_quarantines(end: str) -> None:
    """Half-written weights never serve; generation is not left held; a FULL session heals (B61)."""
    verifier, draft = tiny_pair()
    worker = Worker(ModuleEngine(verifier, draft))
    events = worker.watch()
    session = worker.start(request(mode=IN_PLACE, lease=60.0 if end == "abort" else 0.2))
    push(worker, session.session_id, Target.VERIFIER, {"embed.weight": torch.zeros(10, 4)})
    if end == "abort":
        worker.abort(session.session_id)
    while (event := events.next(20)) and event.kind not in (EventKind.ABORTED, EventKind.EXPIRED):
        pass
    states = {s.target: s.state for s in worker.info().targets}
    assert states == {
        Target.VERIFIER: TargetState.QUARANTINED,
        Target.DRAFT: TargetState.QUARANTINED,
    }
    for model in (verifier, draft):
        with pytest.raises(QuarantinedError):
            model(TOKENS)
    with pytest.raises(QuarantinedError, match="FULL"):
        worker.start(request(scope=Scope.PARTIAL))
    assert not worker.serving
    heal(worker, verifier)
    own = {n: t for n, t in state(draft).items() if n not in ("embed.weight", "head.weight")}
    session = worker.start(request(Target.DRAFT))
    push(worker, session.session_id, Target.DRAFT, own)
    worker.finish(session.session_id)
    draft(TOKENS)
    assert {s.state for s in worker.info().targets} == {TargetState.READY}
    worker.close()


def test_a_session_that_wrote_nothing_harms_nothing(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """Aborted before its first chunk, the old version serves on."""
    verifier, _ = models
    before = state(verifier)
    session = worker.start(request(mode=IN_PLACE))
    worker.abort(session.session_id)
    assert unchanged(verifier, before)
    assert worker.serving
    verifier(TOKENS)


def test_finish_fails_while_something_is_missing(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """An incomplete session stays open and held; the rest can be sent."""
    verifier, _ = models
    new = fresh(verifier.state_dict())
    session = worker.start(request(mode=IN_PLACE))
    push(worker, session.session_id, Target.VERIFIER, {"fc.weight": new["fc.weight"]})
    with pytest.raises(IncompleteError):
        worker.finish(session.session_id)
    push(worker, session.session_id, Target.VERIFIER, new)
    worker.finish(session.session_id)
    assert unchanged(verifier, new)


def test_a_failing_engine_hook_quarantines(models: tuple[Tiny, Tiny]) -> None:
    """What can't be taken back is told as lost, and healed by the next FULL session."""
    verifier, _ = models
    failures = iter([True, False])

    def rebuild(_targets: object) -> None:
        if next(failures):
            raise RuntimeError("no room")

    worker = Worker(ModuleEngine(verifier, rebuild=rebuild))
    session = worker.start(request(mode=IN_PLACE))
    push(worker, session.session_id, Target.VERIFIER, fresh(verifier.state_dict()))
    with pytest.raises(CommitFailedError, match="in place"):
        worker.finish(session.session_id)
    with pytest.raises(QuarantinedError):
        verifier(TOKENS)
    heal(worker, verifier)
    worker.close()


def test_shared_tensors_can_not_be_compared_or_cut_in_place(worker: Worker) -> None:
    """Policies that need staging are refused at start."""
    for policy in (SharedTensorPolicy.ACCEPT_EQUAL, SharedTensorPolicy.UNSHARE):
        with pytest.raises(UnsupportedError):
            worker.start(request(Target.DRAFT, mode=IN_PLACE, shared_tensors=policy))


def test_weights_that_are_being_written_can_not_be_read(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """Readers are told to come back; afterwards they can."""
    verifier, _ = models
    session = worker.start(request(mode=IN_PLACE))
    with pytest.raises(VersionChangedError):
        list(worker.reader.digests([Target.VERIFIER], []))
    push(worker, session.session_id, Target.VERIFIER, fresh(verifier.state_dict()))
    worker.finish(session.session_id)
    assert list(worker.reader.digests([Target.VERIFIER], []))
