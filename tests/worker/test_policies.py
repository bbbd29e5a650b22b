"""Draft sessions and tensors that are one storage with the verifier's."""

from __future__ import annotations

import pytest
import torch

from tests.worker.feeding import (
    failing_at,
    fresh,
    push,
    request,
    same_bits,
    state,
    unchanged,
)
from weightsync.core.errors import CommitRolledBackError, SharedWeightError
from weightsync.core.types import Scope, SharedTensorPolicy, Target
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import Tiny, tiny_pair

DRAFT = Target.DRAFT
UNSHARE = SharedTensorPolicy.UNSHARE


def test_refuse_is_the_default(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A draft session that brings its own embedding can't overwrite the verifier's (B06)."""
    verifier, draft = models
    before = state(verifier), state(draft)
    session = worker.start(request(DRAFT))
    with pytest.raises(SharedWeightError, match=r"embed\.weight"):
        push(worker, session.session_id, DRAFT, fresh(draft.state_dict()))
    worker.abort(session.session_id)
    assert unchanged(verifier, before[0])
    assert unchanged(draft, before[1])


def test_accept_equal_takes_equal_bytes_only(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """Equal copies of shared tensors pass and write nothing; other bytes are refused at prepare."""
    verifier, draft = models
    before = state(verifier)
    accept = SharedTensorPolicy.ACCEPT_EQUAL
    own = fresh(draft.state_dict()) | {n: before[n] for n in ("embed.weight", "head.weight")}
    session = worker.start(request(DRAFT, version="d1", shared_tensors=accept))
    push(worker, session.session_id, DRAFT, own)
    worker.finish(session.session_id)
    assert unchanged(draft, own)
    assert draft.embed.weight is verifier.embed.weight
    session = worker.start(request(DRAFT, version="d2", shared_tensors=accept))
    push(worker, session.session_id, DRAFT, own | {"embed.weight": before["embed.weight"] + 1})
    with pytest.raises(SharedWeightError, match=r"embed\.weight"):
        worker.finish(session.session_id)
    assert unchanged(verifier, before)


def test_accept_equal_holds_against_a_commit_in_between(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """If the verifier changes between the draft's prepare and finish, equality is judged anew."""
    verifier, draft = models
    before = state(verifier)
    accept = SharedTensorPolicy.ACCEPT_EQUAL
    own = fresh(draft.state_dict()) | {n: before[n] for n in ("embed.weight", "head.weight")}
    session = worker.start(request(DRAFT, version="d1", shared_tensors=accept))
    push(worker, session.session_id, DRAFT, own)
    worker.prepare(session.session_id)
    new = fresh(verifier.state_dict())
    other = worker.start(request(version="v1"))
    push(worker, other.session_id, Target.VERIFIER, new)
    worker.finish(other.session_id)
    with pytest.raises(SharedWeightError):
        worker.finish(session.session_id)
    assert unchanged(verifier, new)


def test_unshare_gives_the_draft_its_own_storage(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """Afterwards the draft holds what it was sent, and the verifier what it held."""
    verifier, draft = models
    before, new = state(verifier), fresh(draft.state_dict())
    session = worker.start(request(DRAFT, shared_tensors=UNSHARE))
    push(worker, session.session_id, DRAFT, new)
    worker.finish(session.session_id)
    assert unchanged(verifier, before)
    assert unchanged(draft, new)
    groups = {t.share_group for t in worker.reader.tensors([Target.VERIFIER, DRAFT])}
    assert groups == {""}
    follow = fresh(verifier.state_dict(), 5)
    session = worker.start(request(version="v2"))
    push(worker, session.session_id, Target.VERIFIER, follow)
    worker.finish(session.session_id)
    assert unchanged(draft, new)


def test_unshare_cuts_what_was_sent_only(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A PARTIAL session that sends the embedding leaves the head shared."""
    verifier, draft = models
    session = worker.start(request(DRAFT, scope=Scope.PARTIAL, shared_tensors=UNSHARE))
    push(worker, session.session_id, DRAFT, {"embed.weight": torch.zeros(10, 4)})
    assert worker.finish(session.session_id).checked_share_groups == 1
    assert draft.head.weight is verifier.head.weight
    assert same_bits(draft.embed.weight, torch.zeros(10, 4))


def test_unshare_keeps_ties_inside_the_draft() -> None:
    """A draft whose head is tied to its embedding stays tied after it is cut off (B14)."""
    verifier, draft = tiny_pair()
    draft.head.weight = draft.embed.weight
    before = state(verifier)
    worker = Worker(ModuleEngine(verifier, draft))
    session = worker.start(request(DRAFT, scope=Scope.PARTIAL, shared_tensors=UNSHARE))
    push(worker, session.session_id, DRAFT, {"head.weight": torch.ones(10, 4)})
    worker.finish(session.session_id)
    assert draft.head.weight is draft.embed.weight
    assert same_bits(draft.embed.weight, torch.ones(10, 4))
    assert unchanged(verifier, before)
    worker.close()


def test_a_failed_unshare_keeps_every_value(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A commit that fails after the cut leaves both models with their old bits."""
    verifier, draft = models
    before = state(verifier), state(draft)
    remove = worker.trace.add(failing_at("commit.parameter", "ln.bias"))
    session = worker.start(request(DRAFT, shared_tensors=UNSHARE))
    push(worker, session.session_id, DRAFT, fresh(draft.state_dict()))
    with pytest.raises(CommitRolledBackError):
        worker.finish(session.session_id)
    remove()
    assert unchanged(verifier, before[0])
    assert unchanged(draft, before[1])


def test_shared_tensors_may_come_under_either_name_in_a_session_of_both(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """With both targets in the session the draft's name reaches the shared storage."""
    verifier, draft = models
    new_v, new_d = fresh(verifier.state_dict(), 1), fresh(draft.state_dict(), 2)
    session = worker.start(request(Target.VERIFIER, DRAFT))
    push(worker, session.session_id, DRAFT, new_d)
    own = {n: t for n, t in new_v.items() if n not in ("embed.weight", "head.weight")}
    push(worker, session.session_id, Target.VERIFIER, own)
    worker.finish(session.session_id)
    assert unchanged(draft, new_d)
    assert same_bits(verifier.embed.weight, new_d["embed.weight"])
