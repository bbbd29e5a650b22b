from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from grpc import StatusCode as Code

from tests.integration.conftest import Start
from tests.integration.raw import (
    DRAFT,
    FULL,
    PARTIAL,
    VERIFIER,
    RawTrainer,
    all_bits,
    bits,
    chunk,
    code_of,
    noise,
    segment,
    told,
)
from weightsync.core.errors import (
    IncompleteError,
    InvalidRequestError,
    NothingAppliedError,
    RequestIdReusedError,
    SessionStateError,
    SharedWeightError,
    TargetAbsentError,
    TargetBusyError,
    UnknownSessionError,
    UnknownTensorError,
    UnsupportedError,
)
from weightsync.testing.models import Tiny
from weightsync.v1 import engine_control_pb2, types_pb2, weight_sync_pb2

Models = tuple[Tiny, Tiny]

WHOLE = torch.full((4, 4), 7.0)
"""A right value for `fc.weight`."""


@pytest.mark.usefixtures("old")
def test_a_missing_region_stops_finish(trainer: RawTrainer, models: Models) -> None:
    """A FULL session with a hole is not committed; the tensor is named and the hole is told."""
    session = trainer.start(VERIFIER)
    new = noise(models[0])
    weight = new.pop("fc.weight")
    trainer.push(session, VERIFIER, new)
    rows = segment(
        VERIFIER, "fc.weight", weight, byte_length=48,
        region=types_pb2.Region(offsets=[1, 0], sizes=[3, 4]),
    )  # fmt: skip
    trainer.send([chunk(session, VERIFIER, {}, segments=[rows], payload=bits(weight[1:]))])
    with pytest.raises(IncompleteError) as caught, told():
        trainer.finish(session)
    assert code_of(caught.value) is Code.FAILED_PRECONDITION
    assert any("fc.weight" in subject for subject in caught.value.subjects)
    (missing,) = trainer.session(session).missing
    assert (missing.name, missing.missing_bytes) == ("fc.weight", 16)
    assert [(list(r.offsets), list(r.sizes)) for r in missing.regions] == [([0, 0], [1, 4])]


@pytest.mark.usefixtures("old")
def test_an_empty_partial_session_is_no_update(trainer: RawTrainer) -> None:
    """A PARTIAL session that wrote nothing is an error and not a new version."""
    session = trainer.start(VERIFIER, scope=PARTIAL)
    with pytest.raises(NothingAppliedError), told():
        trainer.finish(session)
    assert not trainer.worker().targets[0].weight_version


def test_a_chunk_after_finish_is_refused(trainer: RawTrainer, models: Models) -> None:
    """A committed session takes no more chunks, and what is live stays."""
    session = trainer.start(VERIFIER)
    trainer.push(session, VERIFIER, noise(models[0]))
    trainer.finish(session)
    live = all_bits(models[0])
    with pytest.raises(SessionStateError, match="COMMITTED") as caught, told():
        trainer.push(session, VERIFIER, {"fc.weight": WHOLE})
    assert code_of(caught.value) is Code.FAILED_PRECONDITION
    assert all_bits(models[0]) == live


@pytest.mark.usefixtures("old")
def test_a_second_writer_is_refused(trainer: RawTrainer) -> None:
    """Who comes second is told who holds the target, in which session, and when to try again."""
    session = trainer.start(VERIFIER, holder="trainer 7")
    with pytest.raises(TargetBusyError) as caught, told():
        trainer.start(DRAFT, VERIFIER)
    assert code_of(caught.value) is Code.ABORTED
    assert caught.value.metadata["holder"] == "trainer 7"
    assert caught.value.metadata["session_id"] == session
    assert caught.value.retry_after
    trainer.abort(session)
    trainer.abort(trainer.start(DRAFT, VERIFIER))


@pytest.mark.usefixtures("old")
def test_an_unknown_session_is_not_found(trainer: RawTrainer) -> None:
    """Every call that names a session says so when there is none."""
    calls: list[Callable[[], object]] = [
        lambda: trainer.session("nobody"),
        lambda: trainer.finish("nobody"),
        lambda: trainer.abort("nobody"),
        lambda: trainer.send([chunk("nobody", VERIFIER, {"fc.weight": WHOLE})]),
        lambda: trainer.stub.PrepareWeightUpdate(
            weight_sync_pb2.PrepareWeightUpdateRequest(session_id="nobody"), timeout=60
        ),
    ]
    for call in calls:
        with pytest.raises(UnknownSessionError, match="nobody") as caught, told():
            call()
        assert code_of(caught.value) is Code.NOT_FOUND


@pytest.mark.usefixtures("old")
def test_a_stream_must_name_its_session(trainer: RawTrainer) -> None:
    """A stream without a session, without a message, or of two sessions is refused."""
    first, second = trainer.start(VERIFIER), trainer.start(DRAFT)
    tensors = {"fc.weight": WHOLE}
    streams = [
        [],
        [chunk("", VERIFIER, tensors)],
        [chunk(first, VERIFIER, tensors), chunk(second, DRAFT, tensors)],
    ]
    for messages in streams:
        with pytest.raises(InvalidRequestError) as caught, told():
            trainer.send(messages)
        assert caught.value.subjects == ("session_id",)


def test_a_draft_session_needs_a_draft(start: Start) -> None:
    """A worker without a draft refuses, and never writes the verifier instead (B03)."""
    verifier = Tiny()
    before = all_bits(verifier)
    with RawTrainer(start(verifier).address) as trainer:
        for targets in ([DRAFT], [VERIFIER, DRAFT]):
            with pytest.raises(TargetAbsentError, match="draft") as caught, told():
                trainer.start(*targets)
            assert code_of(caught.value) is Code.UNIMPLEMENTED
        with pytest.raises(TargetAbsentError), told():
            list(
                trainer.stub.ReadWeights(
                    weight_sync_pb2.ReadWeightsRequest(target=DRAFT), timeout=60
                )
            )
        session = trainer.start(VERIFIER)
        trainer.abort(session)
    assert all_bits(verifier) == before


@pytest.mark.usefixtures("old")
def test_a_draft_session_may_not_write_the_verifiers_tensor(trainer: RawTrainer) -> None:
    """By default the draft's copy of a shared tensor is refused."""
    session = trainer.start(DRAFT)
    with pytest.raises(SharedWeightError, match=r"embed\.weight") as caught, told():
        trainer.push(session, DRAFT, {"embed.weight": torch.zeros(10, 4)})
    assert code_of(caught.value) is Code.FAILED_PRECONDITION


STARTS: dict[str, tuple[dict[str, Any], str]] = {
    "no target": ({"targets": []}, "targets"),
    "unknown target": ({"targets": [9]}, "targets"),
    "no scope": ({"scope": 0}, "scope"),
    "unknown scope": ({"scope": 9}, "scope"),
    "no version": ({"weight_version": ""}, "weight_version"),
    "unknown mode": ({"mode": 9}, "mode"),
    "unknown policy": ({"shared_tensors": 9}, "shared_tensors"),
    "unknown cast": ({"cast": 9}, "cast"),
}


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("case", STARTS)
def test_a_bad_start_names_the_field(trainer: RawTrainer, case: str) -> None:
    """A request with a missing or unknown value is refused by the field's name."""
    fields, field = STARTS[case]
    good = {"request_id": "r1", "targets": [VERIFIER], "scope": FULL, "weight_version": "v1"}
    request = weight_sync_pb2.StartWeightUpdateRequest(**{**good, **fields})
    with pytest.raises(InvalidRequestError) as caught, told():
        trainer.stub.StartWeightUpdate(request, timeout=60)
    assert code_of(caught.value) is Code.INVALID_ARGUMENT
    assert any(subject.startswith(field) for subject in caught.value.subjects)


@pytest.mark.usefixtures("old")
def test_a_request_id_stands_for_one_request(trainer: RawTrainer) -> None:
    """The same id with other contents is refused."""
    request = weight_sync_pb2.StartWeightUpdateRequest(
        request_id="r1", targets=[VERIFIER], scope=FULL, weight_version="v1"
    )
    trainer.stub.StartWeightUpdate(request, timeout=60)
    request.weight_version = "v2"
    with pytest.raises(RequestIdReusedError) as caught, told():
        trainer.stub.StartWeightUpdate(request, timeout=60)
    assert code_of(caught.value) is Code.ALREADY_EXISTS


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("token", ["-1", "x", "1.5", "9" * 40, "²"])
def test_a_bad_page_token_is_refused(trainer: RawTrainer, token: str) -> None:
    """A page token that the worker did not make is refused by its field's name."""
    session = trainer.start(VERIFIER)
    request = weight_sync_pb2.GetWeightUpdateRequest(session_id=session, page_token=token)
    with pytest.raises(InvalidRequestError) as caught, told():
        trainer.stub.GetWeightUpdate(request, timeout=60)
    assert caught.value.subjects == ("page_token",)


@pytest.mark.usefixtures("old")
def test_unknown_names_can_be_neither_read_nor_verified(trainer: RawTrainer) -> None:
    """Reading and verifying name the tensor that is not there."""
    read = weight_sync_pb2.ReadWeightsRequest(target=VERIFIER, names=["fc.weigth"])
    verify = weight_sync_pb2.VerifyWeightsRequest(targets=[VERIFIER], names=["fc.weigth"])
    with pytest.raises(UnknownTensorError, match=r"fc\.weight"), told():
        list(trainer.stub.ReadWeights(read, timeout=60))
    with pytest.raises(UnknownTensorError, match=r"fc\.weight"), told():
        list(trainer.stub.VerifyWeights(verify, timeout=60))
    verify.targets.append(DRAFT)
    with pytest.raises(InvalidRequestError), told():
        list(trainer.stub.VerifyWeights(verify, timeout=60))


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("level", [0, 3, 2**32 - 1])
def test_an_unknown_level_of_sleep_is_refused(trainer: RawTrainer, level: int) -> None:
    """There are two levels of sleep."""
    with pytest.raises(InvalidRequestError) as caught, told():
        trainer.control.Sleep(engine_control_pb2.SleepRequest(level=level), timeout=60)
    assert caught.value.subjects == ("level",)


@pytest.mark.usefixtures("old")
def test_a_worker_without_a_cache_says_so(trainer: RawTrainer) -> None:
    """A control that the engine does not have is UNIMPLEMENTED, as the worker's info tells."""
    assert "ResetPrefixCache" not in trainer.worker().capabilities.controls
    with pytest.raises(UnsupportedError) as caught, told():
        trainer.control.ResetPrefixCache(engine_control_pb2.ResetPrefixCacheRequest(), timeout=60)
    assert code_of(caught.value) is Code.UNIMPLEMENTED
