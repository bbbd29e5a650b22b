from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from weightsync_client import (  # noqa: E402
    Fleet,
    NameMapping,
    Progress,
    SendOptions,
    Shard,
    push_model,
    verify,
)
from weightsync_client.sources import shards  # noqa: E402

from tests.client.live import Live, bits, produce, tiny  # noqa: E402
from weightsync.core.regions import Region  # noqa: E402
from weightsync.core.types import (  # noqa: E402
    CastPolicy,
    ChecksumType,
    Limits,
    Scope,
    Target,
    UpdateMode,
)
from weightsync.server.serve import serve  # noqa: E402

BF16 = tiny(2).state_dict()


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


def test_workers_with_small_messages_get_small_messages() -> None:
    """The smallest limit of the fleet holds for messages that go to all."""
    models = [tiny(0), tiny(1)]
    limits = replace(Limits(), max_message_bytes=(64 << 10) + 32)
    with serve(models[0], limits=limits) as small, serve(models[1]) as large:
        push_model([small.address, large.address], BF16, version="v1")
    assert bits(models[0]) == bits(models[1]) == bits(BF16)
