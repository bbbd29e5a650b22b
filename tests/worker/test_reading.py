"""Weights out again: digests, bytes, and the list of what a worker needs."""

from __future__ import annotations

import pytest
import torch
import xxhash

from tests.worker.feeding import fresh, push, raw, request, same_bits, state, unchanged
from weightsync.core.errors import TooManyStreamsError, UnknownTensorError, VersionChangedError
from weightsync.core.types import Limits, Scope, Target, TargetState, UpdateMode
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import Tiny, tiny_pair

VERIFIER = Target.VERIFIER


def full(worker: Worker, tensors: dict[str, torch.Tensor], version: str) -> None:
    """Run a FULL session of the verifier."""
    session = worker.start(request(version=version))
    push(worker, session.session_id, VERIFIER, tensors)
    worker.finish(session.session_id)


def test_digests_are_of_the_live_bytes(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A sender can tell, without pulling weights, that each tensor is what it sent (B32)."""
    verifier, _ = models
    verifier.fc.weight.data = torch.zeros(4, 4).t()
    new = fresh(verifier.state_dict())
    full(worker, new, "v1")
    digests = {d.name: d for d in worker.reader.digests([VERIFIER], [])}
    assert digests.keys() == new.keys()
    for name, tensor in new.items():
        assert digests[name].xxh3_128 == xxhash.xxh3_128_digest(raw(tensor))
        assert digests[name].weight_version == "v1"


def test_what_is_read_is_what_a_second_worker_takes(worker: Worker) -> None:
    """ReadWeights feeds UpdateWeights: a late worker catches up from a peer, bit for bit."""
    late, _ = tiny_pair(seed=7)
    other = Worker(ModuleEngine(late))
    session = other.start(request(version="copied"))
    with other.stream(session.session_id) as sink:
        from weightsync.core.types import ChecksumType  # noqa: PLC0415
        from weightsync.wire.chunk import parse_chunk, serialize_chunk  # noqa: PLC0415

        for data in worker.reader.read(
            VERIFIER,
            [],
            lambda segments, buffers, _: serialize_chunk(
                session.session_id, segments, buffers, ChecksumType.CRC32C
            ),
        ):
            sink.write(parse_chunk(data, other.limits))
    other.finish(session.session_id)
    mine = [d.xxh3_128 for d in worker.reader.digests([VERIFIER], [])]
    assert [d.xxh3_128 for d in other.reader.digests([VERIFIER], [])] == mine
    other.close()


def test_large_tensors_are_read_in_bounded_messages() -> None:
    """A tensor larger than a message comes in runs that join to its bytes."""
    model = torch.nn.Linear(700, 1000, bias=False)
    worker = Worker(ModuleEngine(model), limits=Limits(max_message_bytes=1 << 20))
    got = bytearray()
    for message in worker.reader.read(VERIFIER, [], lambda s, b, _: list(zip(s, b, strict=True))):
        assert sum(len(buffer) for _, buffer in message) <= worker.limits.max_payload_bytes
        for segment, buffer in message:
            assert segment.byte_offset == len(got)
            got += buffer
    assert bytes(got) == bytes(raw(model.weight))
    worker.close()


def test_a_read_that_a_commit_overtakes_is_told(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """No reader gets a mix of two versions as one."""
    verifier, _ = models
    digests = worker.reader.digests([VERIFIER], [])
    next(digests)
    full(worker, fresh(verifier.state_dict()), "v1")
    with pytest.raises(VersionChangedError):
        list(digests)


def test_unknown_names_are_named(worker: Worker) -> None:
    """Reading a tensor that is not there gives the closest name."""
    for call in (
        lambda: list(worker.reader.digests([VERIFIER], ["fc.wait"])),
        lambda: list(worker.reader.read(VERIFIER, ["fc.wait"], lambda *_: b"")),
    ):
        with pytest.raises(UnknownTensorError, match=r"fc\."):
            call()


def test_readers_are_bounded(models: tuple[Tiny, Tiny]) -> None:
    """One reader more than allowed is refused; the place is free again when one ends."""
    worker = Worker(ModuleEngine(*models), limits=Limits(max_readers=1))
    first = worker.reader.tensors([VERIFIER])
    next(first)
    with pytest.raises(TooManyStreamsError):
        next(worker.reader.tensors([VERIFIER]))
    first.close()  # type: ignore[attr-defined]
    assert next(worker.reader.tensors([VERIFIER])).target is VERIFIER
    worker.close()


def test_what_was_never_written_is_listed(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """`written` turns true tensor by tensor, for every name of a storage (B05, B32, B72)."""
    verifier, _ = models
    session = worker.start(request(scope=Scope.PARTIAL))
    push(worker, session.session_id, VERIFIER, {"embed.weight": torch.zeros(10, 4)})
    worker.finish(session.session_id)
    written = {(t.target, t.name) for t in worker.reader.tensors(worker.targets()) if t.written}
    assert written == {(VERIFIER, "embed.weight"), (Target.DRAFT, "embed.weight")}
    counts = {s.target: s.num_unwritten for s in worker.info().targets}
    assert counts == {VERIFIER: 6, Target.DRAFT: 6}
    full(worker, fresh(verifier.state_dict()), "v2")
    assert worker.info().targets[0].num_unwritten == 0


def test_a_deep_sleep_unsets_versions_and_quarantines() -> None:
    """After level 2 nothing is known of the weights; FULL sessions heal target by target.

    B05, B72.
    """
    verifier, draft = tiny_pair()
    worker = Worker(ModuleEngine(verifier, draft))
    new = fresh(verifier.state_dict())
    full(worker, new, "v1")
    worker.switch.sleep(2)
    assert {s.state for s in worker.info().targets} == {TargetState.ASLEEP}
    worker.switch.wake_up()
    for status in worker.info().targets:
        assert status.state is TargetState.QUARANTINED
        assert (status.weight_version, status.num_unwritten) == ("", status.num_tensors)
    full(worker, new, "v2")
    assert unchanged(verifier, new)
    verifier(torch.arange(10))
    assert worker.info().targets[1].state is TargetState.QUARANTINED
    worker.close()


def test_a_light_sleep_keeps_version_and_bits() -> None:
    """Level 1 brings the same weights back, the version with them."""
    verifier, draft = tiny_pair()
    worker = Worker(ModuleEngine(verifier, draft))
    new = fresh(verifier.state_dict())
    full(worker, new, "v1")
    worker.switch.sleep(1)
    worker.switch.wake_up()
    assert unchanged(verifier, new)
    assert worker.info().targets[0].weight_version == "v1"
    session = worker.start(request(version="v2", mode=UpdateMode.IN_PLACE))
    push(worker, session.session_id, VERIFIER, fresh(new, 4))
    worker.finish(session.session_id)
    assert unchanged(verifier, fresh(new, 4))
    assert same_bits(draft.embed.weight, verifier.embed.weight)
    worker.close()


def test_sharing_is_told_by_name(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """Each tensor's share group is readable, and groups over both models are the verifier's.

    B09.
    """
    before = state(models[0])
    groups = {
        str(t.target) + ":" + t.name: t.share_group for t in worker.reader.tensors(worker.targets())
    }
    assert groups["draft:head.weight"] == groups["verifier:head.weight"] == "verifier:head.weight"
    assert groups["draft:fc.weight"] == ""
    assert len(groups) == 2 * len(before)
