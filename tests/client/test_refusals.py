from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from weightsync_client import (  # noqa: E402
    Fleet,
    SendOptions,
    push_model,
)

from tests.client.live import Live, bits, tiny, without  # noqa: E402
from weightsync.core.errors import (  # noqa: E402
    DTypeMismatchError,
    IncompleteError,
    InvalidRequestError,
    NothingAppliedError,
    OverlapConflictError,
    SessionStateError,
    ShapeMismatchError,
    SharedWeightError,
    TargetAbsentError,
    TargetBusyError,
    UnknownSessionError,
    UnknownTensorError,
)
from weightsync.core.types import (  # noqa: E402
    Scope,
    SharedTensorPolicy,
)
from weightsync.server.serve import serve  # noqa: E402

BF16 = tiny(2).state_dict()
BAD = {
    "unknown name": ({**BF16, "fcc.weight": BF16["fc.weight"]}, UnknownTensorError, "fc.weight"),
    "wrong shape": (
        {**BF16, "fc.weight": torch.ones(4).bfloat16()},
        ShapeMismatchError,
        "fc.weight",
    ),
    "wrong type": ({**BF16, "fc.weight": torch.ones(4, 4)}, DTypeMismatchError, "fc.weight"),
    "missing": (without(BF16, "head.weight"), IncompleteError, "head.weight"),
    "collision": (
        {**BF16, "module.fc.weight": BF16["fc.weight"]},
        InvalidRequestError,
        r"fc\.weight.*module\.fc\.weight",
    ),
    "no tensor": ({**BF16, "fc.weight": 3}, InvalidRequestError, "fc.weight"),
}


def test_names_of_one_storage_must_agree(live: Live) -> None:
    """B18: a draft that brings other bytes for what it shares is refused, and nothing changes."""
    before = bits(live.verifier), bits(live.draft)
    with pytest.raises(OverlapConflictError, match=r"embed\.weight"):
        push_model(live.fleet, tiny(2), tiny(3), version="v1")
    assert (bits(live.verifier), bits(live.draft)) == before


def test_a_draft_alone_may_not_write_the_verifiers_tensor(live: Live) -> None:
    """A draft session that addresses a shared tensor is refused unless the caller says how."""
    before = bits(live.verifier)
    with pytest.raises(SharedWeightError):
        push_model(live.fleet, None, tiny(3), version="v1")
    assert bits(live.verifier) == before
    draft = tiny(3)
    push_model(live.fleet, None, draft, version="v2", shared_tensors=SharedTensorPolicy.UNSHARE)
    assert bits(live.draft) == bits(draft)
    assert bits(live.verifier) == before


@pytest.mark.parametrize("case", BAD.values(), ids=list(BAD))
def test_a_bad_push_changes_nothing(live: Live, case: tuple[Any, type[Exception], str]) -> None:
    """B12, B13, B25, B41: each fault is its own clear error, and the old weights serve on."""
    source, error, text = case
    before = bits(live.verifier), bits(live.draft)
    with pytest.raises(error, match=text):
        push_model(live.fleet, source, version="v1")
    assert (bits(live.verifier), bits(live.draft)) == before
    assert live.worker.info().targets[0].session_id == ""
    push_model(live.fleet, BF16, version="v2")
    assert bits(live.verifier) == bits(BF16)


def test_a_refusal_comes_up_at_the_sender(live: Live) -> None:
    """B85: what the worker refuses comes up where the sender waits, not as a lost connection."""
    session = live.fleet.update(version="v1", options=SendOptions(chunk_bytes=16))
    live.worker.abort(session.ticket.session_ids[0], "by somebody else")

    def push() -> None:
        session.push(BF16)
        session.settle()

    with pytest.raises(SessionStateError, match="by somebody else"):
        push()


def test_an_exception_in_the_block_aborts(live: Live) -> None:
    """B55: the session is gone at once, and another can start."""
    before = bits(live.verifier)
    session = live.fleet.update(version="v1")

    def fail() -> None:
        with session:
            session.push(tiny(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert bits(live.verifier) == before
    with pytest.raises(SessionStateError):
        session.push(tiny(2))
    push_model(live.fleet, BF16, version="v2")


def test_a_second_writer_learns_who_is_first(live: Live) -> None:
    """B57: the refusal is immediate and names the holder."""
    with live.fleet.update(version="v1", holder="trainer A") as session:
        with pytest.raises(TargetBusyError, match="trainer A"):
            live.fleet.update(version="v2")
        session.push(BF16)


def test_a_partial_push_of_nothing_is_an_error(live: Live) -> None:
    """B25, B33: a session in which nothing applied never counts as a success."""
    ignoring = live.fleet.update(version="v1", scope=Scope.PARTIAL, ignore_names=["*"])
    ignoring.push({"nobody.knows": torch.ones(3)})
    with pytest.raises(NothingAppliedError):
        ignoring.finish()
    with live.fleet.update(version="v1", scope=Scope.PARTIAL) as session:
        session.push({"fc.weight": BF16["fc.weight"]})
    assert session.report.sent_tensors == 1


def test_ignored_names_are_reported(live: Live) -> None:
    """B17: a name that a pattern lets pass is not sent, and is listed."""
    source = {**BF16, "confidence_head.weight": torch.ones(3)}
    report = push_model(live.fleet, source, version="v1", ignore_names=["confidence_head.*"])
    assert report.ignored_names == ("confidence_head.weight",)


def test_missing_targets_and_sessions_are_told(live: Live) -> None:
    """B03: a draft is never replaced by another target; an unknown session is no success."""
    with (
        serve(tiny(0)) as server,
        Fleet([server.address]) as fleet,
        pytest.raises(TargetAbsentError),
    ):
        fleet.update(version="v1", target="draft")
    with pytest.raises(UnknownSessionError):
        live.worker.finish("nobody")
    with pytest.raises(InvalidRequestError):
        live.fleet.update(version="v1", target="critic")
    session = live.fleet.update(version="v1", target=["verifier", "draft"])
    with pytest.raises(InvalidRequestError, match="say which"):
        session.push(BF16)
    session.abort()


def test_a_fleet_of_nobody_is_refused() -> None:
    """A fleet has at least one worker, and each worker once."""
    for workers in ([], ["127.0.0.1:1", "127.0.0.1:1"]):
        with pytest.raises(InvalidRequestError):
            Fleet(workers)
