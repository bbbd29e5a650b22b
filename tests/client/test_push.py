from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from weightsync_client import (  # noqa: E402
    Fleet,
    NameMapping,
    Progress,
    SendOptions,
    Shard,
    connect,
    push_model,
    verify,
)
from weightsync_client.sources import shards  # noqa: E402

from tests.client.live import bits, produce, tiny  # noqa: E402
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
from weightsync.core.regions import Region  # noqa: E402
from weightsync.core.types import (  # noqa: E402
    CastPolicy,
    ChecksumType,
    Limits,
    Scope,
    SharedTensorPolicy,
    Target,
    TargetState,
    UpdateMode,
)
from weightsync.server.serve import serve  # noqa: E402


class Live:
    """A served verifier and draft that share their embedding, and a fleet of that one worker."""

    def __init__(self, address: str) -> None:
        self.verifier = tiny(0)
        self.draft = tiny(1)
        self.draft.embed.weight = self.verifier.embed.weight
        self.server = serve(self.verifier, self.draft, address=address)
        self.fleet = Fleet([self.server.address])
        self.worker = self.fleet.workers[0]


@pytest.fixture
def live() -> Iterator[Live]:
    """Serve over TCP."""
    made = Live("127.0.0.1:0")
    with made.server, made.fleet:
        yield made


@pytest.fixture(params=["tcp", "unix"])
def everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Live]:
    """Serve over TCP and over a unix socket whose path needs coding."""
    made = Live("127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/a b%20/w.sock")
    with made.server, made.fleet:
        yield made


def test_a_model_goes_live_bit_for_bit(everywhere: Live) -> None:
    """B31: after a push the worker holds the source's bits, by every way of connecting."""
    source = tiny(2)
    untouched = bits(everywhere.draft)
    report = push_model(everywhere.server.address, source, version="v1")
    assert bits(everywhere.verifier) == bits(source)
    assert report.committed
    assert report.workers[0].weight_versions[Target.VERIFIER] == "v1"
    shared = {"embed.weight": bits(source)["embed.weight"]}
    assert bits(everywhere.draft) == untouched | shared


def test_verifier_and_draft_switch_together(live: Live) -> None:
    """B01, B02: one call updates both; what they share is sent once."""
    source, draft = tiny(2), tiny(3)
    draft.embed.weight = source.embed.weight
    own = bits(draft)
    report = push_model(live.fleet, source, draft, version="v1")
    assert bits(live.verifier) == bits(source)
    assert bits(live.draft) == own
    assert report.workers[0].weight_versions == dict.fromkeys(Target, "v1")
    sizes = {k: len(v) for k, v in bits(source).items()}
    assert report.sent_bytes == 2 * sum(sizes.values()) - sizes["embed.weight"]


def test_names_of_one_storage_must_agree(live: Live) -> None:
    """B18: a draft that brings other bytes for what it shares is refused, and nothing changes."""
    before = bits(live.verifier), bits(live.draft)
    with pytest.raises(OverlapConflictError, match=r"embed\.weight"):
        push_model(live.fleet, tiny(2), tiny(3), version="v1")
    assert (bits(live.verifier), bits(live.draft)) == before


@pytest.mark.parametrize("names", [("embed.weight",), ("head.weight", "embed.weight")])
def test_a_tied_model_needs_one_name_of_the_pair(names: tuple[str, ...]) -> None:
    """B19, B20: either name, or both with equal bytes in any order, make the pair complete."""
    model, source = tiny(0, tied=True), tiny(1, tied=True)
    state = source.state_dict()
    rest = {k: v for k, v in state.items() if k not in ("embed.weight", "head.weight")}
    with serve(model) as server, Fleet([server.address]) as fleet:
        push_model(fleet, {**{n: state[n] for n in names}, **rest}, version="v1")
    assert bits(model) == bits(source)
    assert model.head.weight is model.embed.weight


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


def test_memory_may_be_reused_when_push_returns(live: Live) -> None:
    """What was pushed is what arrives, though the sender overwrites its memory at once."""
    source = tiny(2)
    wanted = bits(source)
    with live.fleet.update(version="v1") as session:
        for name, tensor in produce(source):
            scratch = tensor.clone()
            session.push({name: scratch})
            scratch.view(torch.uint8).fill_(255)
    assert bits(live.verifier) == wanted


def test_a_producer_may_reuse_its_memory_for_each_tensor(live: Live) -> None:
    """An iterator that yields the same memory again and again is read tensor by tensor."""
    source = tiny(2)
    push_model(live.fleet, produce(source), version="v1")
    assert bits(live.verifier) == bits(source)


@pytest.mark.parametrize("chunk_bytes", [16, 100, None])
@pytest.mark.parametrize("checksum", list(ChecksumType))
@pytest.mark.parametrize("streams", [1, 3])
def test_the_way_of_the_bytes_does_not_show(
    live: Live, chunk_bytes: int | None, checksum: ChecksumType, streams: int
) -> None:
    """B36: message sizes, checksums and numbers of connections give the same weights."""
    source = tiny(4)
    options = SendOptions(checksum=checksum, chunk_bytes=chunk_bytes, streams=streams)
    push_model(live.fleet, source, version="v1", options=options)
    assert bits(live.verifier) == bits(source)


def test_tensors_around_the_message_limit_arrive() -> None:
    """B76: just below, at, and far above gRPC's default limit."""
    sizes = [(4 << 20) - 1, 4 << 20, (4 << 20) + 1, 20 << 20]

    def make(fill: int) -> Any:
        model = torch.nn.Module()
        for index, size in enumerate(sizes):
            model.register_buffer(f"b{index}", torch.full((size,), fill, dtype=torch.uint8))
        return model

    model = make(0)
    with serve(model) as server:
        report = push_model(server.address, make(7), version="v1")
        assert verify(server.address, make(7)).equal
    assert report.sent_bytes == sum(sizes)


def test_shards_of_several_senders_make_one_version(live: Live) -> None:
    """B58: processes that join with the ticket fill the same session, and one commits it."""
    source = tiny(2)
    whole = list(shards(source.state_dict()))
    with live.fleet.update(version="v1") as session:
        with Fleet([live.server.address]) as other, other.join(session.ticket) as joined:
            joined.push(whole[::2])
        session.push(whole[1::2])
    assert bits(live.verifier) == bits(source)
    assert session.report.committed


def test_a_session_can_be_taken_up_after_a_crash(live: Live) -> None:
    """Joined for what is missing, a second process sends only that."""
    source = tiny(2)
    state = source.state_dict()
    first = live.fleet.update(version="v1")
    first.push({k: state[k] for k in ("embed.weight", "fc.weight")})
    first.settle()
    with Fleet([live.server.address]) as fleet:
        second = fleet.join(first.ticket, missing_only=True)
        second.push(source)
        report = second.finish()
    assert bits(live.verifier) == bits(source)
    sent = len(bits(source)["embed.weight"]) + len(bits(source)["fc.weight"])
    assert report.sent_bytes == sum(map(len, bits(source).values())) - sent


def test_regions_can_be_pushed_by_hand(live: Live) -> None:
    """B20: a part of a tensor, as rows of it, changes these rows only."""
    rows = next(iter(shards({"embed.weight": torch.ones(2, 4, dtype=torch.bfloat16)})))
    wanted = live.verifier.embed.weight.detach().clone()
    wanted[2:4] = 1
    with live.fleet.update(version="v1", scope=Scope.PARTIAL) as session:
        session.push([Shard("embed.weight", rows.array, (10, 4), Region((2, 0), (2, 4)))])
    assert bits({"w": live.verifier.embed.weight}) == bits({"w": wanted})


def test_in_place_updates_work_the_same(live: Live) -> None:
    """A session without an arena ends with the same bits."""
    source = tiny(2)
    push_model(live.fleet, source, version="v1", mode=UpdateMode.IN_PLACE)
    assert bits(live.verifier) == bits(source)


def test_progress_is_told_to_the_end(live: Live) -> None:
    """The callback sees rising bytes that end at the total."""
    seen: list[Progress] = []
    push_model(live.fleet, tiny(2), version="v1", progress=seen.append)
    total = sum(map(len, bits(live.verifier).values()))
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert (seen[-1].bytes_done, seen[-1].bytes_total) == (total, total)
    assert seen[-1].rate > 0


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a state dict that lacks a name."""
    return {k: v for k, v in state.items() if k != name}


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


def test_wrapped_models_need_no_rules(live: Live) -> None:
    """B30: a compiled model's names fit by themselves."""
    source = tiny(2)
    push_model(live.fleet, {f"_orig_mod.module.{k}": v for k, v in BF16.items()}, version="v1")
    assert bits(live.verifier) == bits(source)


def test_a_text_model_fits_into_a_larger_one() -> None:
    """B24: by a prefix rule a part is written; the rest is untouched and no failure."""
    outer = torch.nn.ModuleDict({"language_model": tiny(0), "visual": torch.nn.Linear(2, 2)})
    visual = bits(outer["visual"])
    names = NameMapping(rules=(("model", "language_model"),))
    source = tiny(1)
    with serve(outer) as server:
        push_model(
            server.address,
            {f"model.{k}": v for k, v in source.state_dict().items()},
            version="v1",
            scope=Scope.PARTIAL,
            names=names,
        )
    assert bits(outer["language_model"]) == bits(source)
    assert bits(outer["visual"]) == visual


def test_casts_are_those_of_torch(live: Live) -> None:
    """B41: when asked for, a float32 source becomes the worker's bfloat16, and verifies so."""
    source = tiny(5, dtype=torch.float32)
    push_model(live.fleet, source, version="v1", cast=CastPolicy.ALLOW)
    wanted = {k: v if k == "rbias" else v.bfloat16() for k, v in source.state_dict().items()}
    assert bits(live.verifier) == bits(wanted)
    assert verify(live.fleet, source).equal


def test_verify_names_each_difference(live: Live) -> None:
    """B32, B46: one changed bit is found by name; NaNs equal themselves; what lacks is listed."""
    source = tiny(2)
    with torch.no_grad():
        source.fc.weight[0, 0] = float("nan")
    push_model(live.fleet, source, version="v1")
    report = verify(live.fleet, source)
    assert report.equal
    assert not report.not_compared
    assert list(report.weight_versions.values()) == ["v1"]
    source.ln.weight.detach().view(torch.uint8)[3] ^= 1
    (difference,) = verify(live.fleet, source).differences
    assert difference.name == "ln.weight"
    assert verify(live.fleet, without(source.state_dict(), "ln.weight")).not_compared == (
        "verifier:ln.weight",
    )


def test_live_weights_can_be_read_back(live: Live) -> None:
    """What a worker holds comes out in the form in which it goes in."""
    state: dict[str, bytearray] = {}
    for chunk in live.worker.read(Target.VERIFIER):
        position = 0
        for segment in chunk.segments:
            end = position + segment.byte_length
            state.setdefault(segment.name, bytearray()).extend(chunk.payload[position:end])
            position = end
    assert {k: bytes(v) for k, v in state.items()} == bits(live.verifier)


def test_events_tell_of_an_update(live: Live) -> None:
    """A watcher sees the session from start to commit, and can stop watching."""
    events = live.worker.watch()
    assert next(events).kind.name == "WATCHING"
    push_model(live.fleet, BF16, version="v1")
    assert [next(events).kind.name for _ in range(3)] == ["STARTED", "PREPARED", "COMMITTED"]
    events.close()  # type: ignore[attr-defined]


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


def test_health_is_asked_of_the_worker(live: Live) -> None:
    """Serving is what the worker's health service says."""
    assert connect(live.server.address).serving()
    assert live.worker.info().targets[0].state is TargetState.READY


def test_many_sessions_leave_nothing_behind(live: Live) -> None:
    """B74: neither threads nor sessions pile up."""
    push_model(live.fleet, BF16, version="v0")
    before = threading.active_count()
    for index in range(20):
        push_model(live.fleet, BF16, version=f"v{index}")
    assert threading.active_count() <= before + 2
    assert live.worker.info().targets[0].num_commits == 21


def test_workers_with_small_messages_get_small_messages() -> None:
    """The smallest limit of the fleet holds for messages that go to all."""
    models = [tiny(0), tiny(1)]
    limits = replace(Limits(), max_message_bytes=(64 << 10) + 32)
    with serve(models[0], limits=limits) as small, serve(models[1]) as large:
        push_model([small.address, large.address], BF16, version="v1")
    assert bits(models[0]) == bits(models[1]) == bits(BF16)
