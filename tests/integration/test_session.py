from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from tests.integration.raw import (
    DRAFT,
    PARTIAL,
    VERIFIER,
    RawTrainer,
    all_bits,
    bits,
    chunk,
    noise,
)
from weightsync.server.server import Server
from weightsync.testing.models import Tiny
from weightsync.v1 import engine_control_pb2, types_pb2, weight_sync_pb2

Models = tuple[Tiny, Tiny]
SHARED = {"embed.weight", "head.weight"}


def test_a_full_session_replaces_the_verifier(trainer: RawTrainer, models: Models) -> None:
    """All tensors of the verifier are sent, committed, and live bit for bit; memory stays."""
    verifier, draft = models
    pointers = {name: t.data_ptr() for name, t in verifier.state_dict().items()}
    own = {name: b for name, b in all_bits(draft).items() if name not in SHARED}
    new = noise(verifier)
    session = trainer.start(VERIFIER, version="step 1")
    trainer.push(session, VERIFIER, new)
    report = trainer.finish(session)
    assert all_bits(verifier) == {name: bits(t) for name, t in new.items()}
    assert {name: t.data_ptr() for name, t in verifier.state_dict().items()} == pointers
    assert {name: b for name, b in all_bits(draft).items() if name not in SHARED} == own
    assert bits(draft.embed.weight) == bits(new["embed.weight"])
    assert report.session.state == types_pb2.SESSION_STATE_COMMITTED
    assert report.applied_tensors == len(new)
    (status,) = report.targets
    assert status.weight_version == "step 1"


def test_both_targets_switch_in_one_session(trainer: RawTrainer, models: Models) -> None:
    """Verifier and draft are committed together, a shared tensor being sent once."""
    verifier, draft = models
    new, own = noise(verifier), noise(draft, seed=2)
    own = {name: t for name, t in own.items() if name not in SHARED}
    session = trainer.start(VERIFIER, DRAFT)
    trainer.push(session, DRAFT, own)
    trainer.push(session, VERIFIER, new)
    trainer.finish(session)
    assert all_bits(verifier) == {name: bits(t) for name, t in new.items()}
    shared = {name: new[name] for name in SHARED}
    assert all_bits(draft) == {name: bits(t) for name, t in (own | shared).items()}
    assert {s.weight_version for s in trainer.worker().targets} == {"v1"}


def test_nothing_is_live_before_finish(trainer: RawTrainer, models: Models) -> None:
    """A prepared session has changed nothing, and can still be dropped."""
    old = all_bits(models[0])
    session = trainer.start(VERIFIER)
    trainer.push(session, VERIFIER, noise(models[0]))
    request = weight_sync_pb2.PrepareWeightUpdateRequest(session_id=session)
    prepared = trainer.stub.PrepareWeightUpdate(request, timeout=60)
    assert prepared.session.state == types_pb2.SESSION_STATE_PREPARED
    assert all_bits(models[0]) == old
    assert trainer.abort(session).state == types_pb2.SESSION_STATE_ABORTED
    assert all_bits(models[0]) == old


def test_finish_and_abort_may_be_repeated(trainer: RawTrainer, models: Models) -> None:
    """A second finish or abort gives the first one's answer."""
    session = trainer.start(VERIFIER)
    trainer.push(session, VERIFIER, noise(models[0]))
    assert trainer.finish(session) == trainer.finish(session)
    session = trainer.start(VERIFIER)
    assert trainer.abort(session) == trainer.abort(session)


def test_a_start_may_be_repeated(trainer: RawTrainer) -> None:
    """The same request with the same id is the same session."""
    request = weight_sync_pb2.StartWeightUpdateRequest(
        request_id="r1", targets=[VERIFIER], scope=PARTIAL, weight_version="v1"
    )
    first = trainer.stub.StartWeightUpdate(request, timeout=60)
    again = trainer.stub.StartWeightUpdate(request, timeout=60)
    assert first.session.session_id == again.session.session_id
    assert first.instance_id == trainer.worker().instance_id


def test_several_streams_fill_one_session(server: Server, models: Models) -> None:
    """Ranks of one trainer join a session by its id, each on its own connection."""
    new = noise(models[0])
    names = sorted(new)
    with RawTrainer(server.address) as first, RawTrainer(server.address) as second:
        session = first.start(VERIFIER)
        futures = [
            trainer.stub.UpdateWeights.future(
                iter([chunk(session, VERIFIER, {name: new[name]}) for name in part]), timeout=60
            )
            for trainer, part in ((first, names[::2]), (second, names[1::2]))
        ]
        reports = [future.result() for future in futures]
        second.finish(session)
    assert sum(r.applied_tensors for r in reports) == len(new)
    assert sum(r.received_bytes for r in reports) == sum(t.nbytes for t in new.values())
    assert all_bits(models[0]) == {name: bits(t) for name, t in new.items()}


def test_later_messages_need_no_session_id(trainer: RawTrainer, models: Models) -> None:
    """Only the first message of a stream must name the session."""
    session = trainer.start(VERIFIER)
    messages = [chunk("", VERIFIER, {name: t}) for name, t in noise(models[0]).items()]
    messages[0].session_id = session
    assert trainer.send(messages).received_chunks == len(messages)
    assert not trainer.session(session).missing


def test_missing_tensors_come_in_pages(trainer: RawTrainer, models: Models) -> None:
    """What a session lacks is told page by page, each tensor once."""
    session = trainer.start(VERIFIER)
    trainer.push(session, VERIFIER, {"fc.bias": torch.zeros(4)})
    names: list[str] = []
    token = ""
    while True:
        page = trainer.stub.GetWeightUpdate(
            weight_sync_pb2.GetWeightUpdateRequest(
                session_id=session, page_size=2, page_token=token
            ),
            timeout=60,
        )
        assert len(page.missing) <= 2
        names += [missing.name for missing in page.missing]
        token = page.next_page_token
        if not token:
            break
    assert sorted(names) == sorted(models[0].state_dict().keys() - {"fc.bias"})


def test_tensors_are_listed(trainer: RawTrainer, models: Models) -> None:
    """The list has every tensor of a checkpoint with its type, shape and share group."""
    request = weight_sync_pb2.ListTensorsRequest()
    listed = {
        (info.target, info.name): info
        for answer in trainer.stub.ListTensors(request, timeout=60)
        for info in answer.tensors
    }
    for target, model in zip((VERIFIER, DRAFT), models, strict=True):
        state = model.state_dict()
        assert {name for t, name in listed if t == target} == state.keys()
        for name, tensor in state.items():
            assert listed[target, name].shape == list(tensor.shape)
            assert bool(listed[target, name].share_group) is (name in SHARED)


def test_digests_are_those_of_the_senders_bytes(trainer: RawTrainer, models: Models) -> None:
    """VerifyWeights gives the XXH3-128 of each live tensor, of some or of all."""
    live = models[0].state_dict()
    request = weight_sync_pb2.VerifyWeightsRequest(targets=[VERIFIER])
    digests = {
        digest.name: digest.xxh3_128
        for answer in trainer.stub.VerifyWeights(request, timeout=60)
        for digest in answer.digests
    }
    assert digests == {name: xxh3_128_digest(bits(t)) for name, t in live.items()}
    request.names.append("fc.bias")
    (answer,) = trainer.stub.VerifyWeights(request, timeout=60)
    assert [d.name for d in answer.digests] == ["fc.bias"]


def test_weights_are_read_as_they_are_sent(trainer: RawTrainer, models: Models) -> None:
    """ReadWeights gives chunks whose payload, cut by its segments, is the live tensors."""
    request = weight_sync_pb2.ReadWeightsRequest(target=VERIFIER)
    read: dict[str, bytes] = {}
    for answer in trainer.stub.ReadWeights(request, timeout=60):
        table = b"".join(segment.SerializeToString() for segment in answer.segments)
        assert answer.checksum == xxh3_64_intdigest(table + answer.payload)
        position = 0
        for segment in answer.segments:
            piece = answer.payload[position : position + segment.byte_length]
            read[segment.name] = read.get(segment.name, b"") + piece
            position += segment.byte_length
        assert position == len(answer.payload)
    assert read == all_bits(models[0])


def test_watchers_are_told(trainer: RawTrainer, models: Models) -> None:
    """A watcher hears of each step of a session, in order, without a gap."""
    kind = weight_sync_pb2.WatchWorkerResponse
    events = trainer.stub.WatchWorker(weight_sync_pb2.WatchWorkerRequest(), timeout=60)
    first = next(events)
    assert first.kind == kind.KIND_WATCHING
    session = trainer.start(VERIFIER, version="v7")
    trainer.push(session, VERIFIER, noise(models[0]))
    trainer.finish(session)
    heard = [next(events) for _ in range(3)]
    assert [e.kind for e in heard] == [kind.KIND_STARTED, kind.KIND_PREPARED, kind.KIND_COMMITTED]
    assert [e.sequence for e in heard] == [first.sequence + i for i in (1, 2, 3)]
    assert {(e.session_id, e.weight_version) for e in heard} == {(session, "v7")}
    events.cancel()


def test_generation_is_held_and_let_go(trainer: RawTrainer, models: Models) -> None:
    """Between pause and resume no forward pass runs; both may be repeated."""
    pause = engine_control_pb2.PauseGenerationRequest()
    resume = engine_control_pb2.ResumeGenerationRequest()
    trainer.control.PauseGeneration(pause, timeout=60)
    trainer.control.PauseGeneration(pause, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        logits = pool.submit(models[0], torch.tensor([1, 2]))
        # Calls that answer while the pass is held: it had its chance to run.
        for _ in range(20):
            trainer.worker()
        assert not logits.done()
        trainer.control.ResumeGeneration(resume, timeout=60)
        assert logits.result(60).shape == (2, 10)
    trainer.control.ResumeGeneration(resume, timeout=60)


def test_sleep_shows_in_the_state(trainer: RawTrainer, models: Models) -> None:
    """A worker that was updated can sleep, says so, and after level 1 has its weights again."""
    session = trainer.start(VERIFIER)
    trainer.push(session, VERIFIER, noise(models[0]))
    trainer.finish(session)
    list(trainer.stub.VerifyWeights(weight_sync_pb2.VerifyWeightsRequest(), timeout=60))
    old = all_bits(models[0])
    asleep = trainer.control.Sleep(engine_control_pb2.SleepRequest(level=1), timeout=60)
    assert {s.state for s in asleep.targets} == {types_pb2.TARGET_STATE_ASLEEP}
    awake = trainer.control.WakeUp(engine_control_pb2.WakeUpRequest(), timeout=60)
    assert {s.state for s in awake.targets} == {types_pb2.TARGET_STATE_READY}
    assert all_bits(models[0]) == old
