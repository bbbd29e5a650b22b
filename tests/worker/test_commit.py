"""A commit is all or nothing, in place, and keeps what was one storage one storage."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.worker.feeding import (
    all_pieces,
    failing_at,
    fresh,
    pieces,
    push,
    request,
    same_bits,
    send,
    state,
    unchanged,
)
from weightsync.core.errors import (
    CommitFailedError,
    CommitRolledBackError,
    EngineUnavailableError,
    IncompleteError,
    NotFiniteError,
    NothingAppliedError,
)
from weightsync.core.regions import Region
from weightsync.core.types import CacheReset, Limits, Scope, SessionState, Target, TargetState
from weightsync.core.views import CommitReport, EventKind
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import Tiny, tiny_pair

TOKENS = torch.arange(10)
ARENA = "weightsync-arena"


def update(
    worker: Worker, target: Target, tensors: dict[str, torch.Tensor], **more: Any
) -> CommitReport:
    """Run one whole session."""
    session = worker.start(request(target, **more))
    push(worker, session.session_id, target, tensors)
    return worker.finish(session.session_id)


def test_live_weights_change_in_the_commit_only(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """Until finish the old version serves, bit for bit; after it the new one does."""
    verifier, _ = models
    before, new = state(verifier), fresh(verifier.state_dict())
    session = worker.start(request())
    push(worker, session.session_id, Target.VERIFIER, new)
    assert unchanged(verifier, before)
    worker.prepare(session.session_id)
    assert unchanged(verifier, before)
    report = worker.finish(session.session_id)
    assert unchanged(verifier, new)
    assert report.session.state is SessionState.COMMITTED
    assert report.applied_bytes == sum(t.nbytes for t in new.values())
    assert report.applied_tensors == len(new)


def test_commit_is_in_place(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """Addresses, strides, Parameter objects and their attributes survive three sessions.

    B68, B70.
    """
    verifier, _ = models
    vars(verifier.fc.weight)["weight_loader"] = "kept"
    verifier.ln.weight.requires_grad_(False)

    def identity() -> list[tuple[object, ...]]:
        now = dict(verifier.named_parameters()) | dict(verifier.named_buffers())
        return [
            (name, id(t), t.data_ptr(), t.stride(), type(t), t.requires_grad)
            for name, t in now.items()
        ]

    first = identity()
    for seed in range(3):
        update(worker, Target.VERIFIER, fresh(verifier.state_dict(), seed), version=f"v{seed}")
        assert identity() == first
    assert vars(verifier.fc.weight)["weight_loader"] == "kept"


def test_draft_sees_the_verifiers_shared_weights_and_keeps_its_own(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """A verifier session moves the draft's shared tensors and nothing else of it (B01, B02)."""
    verifier, draft = models
    before = state(draft)
    new = fresh(verifier.state_dict())
    update(worker, Target.VERIFIER, new)
    now = draft.state_dict()
    assert same_bits(now["embed.weight"], new["embed.weight"])
    assert same_bits(now["head.weight"], new["head.weight"])
    own = set(before) - {"embed.weight", "head.weight"}
    assert all(same_bits(now[name], before[name]) for name in own)
    assert draft.embed.weight is verifier.embed.weight
    reference = Tiny()
    reference.load_state_dict(now)
    assert same_bits(draft(TOKENS), reference(TOKENS))


def test_draft_session_leaves_the_verifier_alone(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A FULL draft session needs the draft's own tensors only and touches no others (B01, B03)."""
    verifier, draft = models
    before = state(verifier)
    own = {
        n: t
        for n, t in fresh(draft.state_dict()).items()
        if n.split(".")[0] not in ("embed", "head")
    }
    report = update(worker, Target.DRAFT, own, version="d1")
    assert unchanged(verifier, before)
    assert all(same_bits(draft.state_dict()[n], t) for n, t in own.items())
    versions = {s.target: s.weight_version for s in worker.info().targets}
    assert versions == {Target.VERIFIER: "", Target.DRAFT: "d1"}
    assert report.checked_share_groups == 2


def test_both_targets_switch_in_one_session(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """One session writes both models; shared tensors are sent once and count for both (B16)."""
    verifier, draft = models
    new_v, new_d = fresh(verifier.state_dict(), 1), fresh(draft.state_dict(), 2)
    session = worker.start(request(Target.VERIFIER, Target.DRAFT, version="both"))
    push(worker, session.session_id, Target.VERIFIER, new_v)
    own = {n: t for n, t in new_d.items() if n not in ("embed.weight", "head.weight")}
    push(worker, session.session_id, Target.DRAFT, own)
    report = worker.finish(session.session_id)
    assert unchanged(verifier, new_v)
    assert all(same_bits(draft.state_dict()[n], t) for n, t in own.items())
    assert {s.weight_version for s in report.targets} == {"both"}


@pytest.mark.parametrize("tie", ["one parameter", "two parameters over one storage"])
def test_tie_inside_a_model_holds(tie: str) -> None:
    """Either name of a tied pair updates both, wholly or by rows, and finishes FULL.

    B19, B20, B21.
    """
    model = Tiny()
    model.head.weight = (
        model.embed.weight if tie == "one parameter" else nn.Parameter(model.embed.weight.data)
    )
    worker = Worker(ModuleEngine(model))
    for name in ("embed.weight", "head.weight"):
        other = "head.weight" if name == "embed.weight" else "embed.weight"
        new = {n: t for n, t in fresh(model.state_dict(), len(name)).items() if n != other}
        update(worker, Target.VERIFIER, new, version=name)
        assert same_bits(model.state_dict()[other], new[name])
    rows = torch.randn(2, 4)
    session = worker.start(request(scope=Scope.PARTIAL))
    part = pieces(
        Target.VERIFIER, "embed.weight", rows, region=Region((2, 0), (2, 4)), shape=(10, 4)
    )
    send(worker, session.session_id, [part])
    worker.finish(session.session_id)
    assert same_bits(model.head.weight[2:4], rows)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    worker.close()


def test_a_commit_that_fails_anywhere_is_taken_back(models: tuple[Tiny, Tiny]) -> None:
    """Whichever parameter the commit fails at, both models are the old ones, bit for bit."""
    verifier, draft = models
    worker = Worker(ModuleEngine(verifier, draft))
    before = state(verifier), state(draft)
    for name in verifier.state_dict():
        remove = worker.trace.add(failing_at("commit.parameter", name))
        session = worker.start(request(Target.VERIFIER, Target.DRAFT, version=name))
        push(worker, session.session_id, Target.VERIFIER, fresh(verifier.state_dict()))
        own = {n: t for n, t in fresh(draft.state_dict()).items() if n[:4] not in ("embe", "head")}
        push(worker, session.session_id, Target.DRAFT, own)
        with pytest.raises(CommitRolledBackError, match="injected"):
            worker.finish(session.session_id)
        remove()
        assert unchanged(verifier, before[0])
        assert unchanged(draft, before[1])
        assert worker.update(session.session_id).state is SessionState.FAILED
        with pytest.raises(CommitRolledBackError):
            worker.finish(session.session_id)
    assert worker.serving
    assert worker.staging_bytes == 0
    update(worker, Target.VERIFIER, fresh(verifier.state_dict()), version="next")
    worker.close()


def test_an_engine_hook_that_fails_takes_the_commit_back(models: tuple[Tiny, Tiny]) -> None:
    """If the engine can't rebuild what it derives, old weights and old derivation return."""
    verifier, _ = models
    seen: list[float] = []

    def rebuild(_targets: object) -> None:
        seen.append(verifier.fc.weight[0, 0].item())
        if len(seen) == 1:
            raise RuntimeError("no room")

    worker = Worker(ModuleEngine(verifier, rebuild=rebuild))
    before = state(verifier)
    with pytest.raises(CommitRolledBackError, match="no room"):
        update(worker, Target.VERIFIER, fresh(verifier.state_dict()))
    assert unchanged(verifier, before)
    assert seen[1] == before["fc.weight"][0, 0].item()
    worker.close()


def test_an_engine_that_cuts_a_tie_is_quarantined(models: tuple[Tiny, Tiny]) -> None:
    """A share group that is not one storage after the commit is found; the targets stop serving."""
    verifier, draft = models

    def cut(_targets: object) -> None:
        draft.head.weight = nn.Parameter(draft.head.weight.detach().clone())

    worker = Worker(ModuleEngine(verifier, draft, rebuild=cut))
    with pytest.raises(CommitFailedError, match=r"head\.weight"):
        update(worker, Target.VERIFIER, fresh(verifier.state_dict()))
    assert not worker.serving
    states = {status.target: status.state for status in worker.info().targets}
    assert states[Target.VERIFIER] is TargetState.QUARANTINED
    worker.close()


def test_no_forward_sees_two_versions(models: tuple[Tiny, Tiny]) -> None:
    """A forward that runs during a commit of all ones to all twos is all-one or all-two.

    B59, B60.
    """
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(8)])
    for layer in model:
        nn.init.constant_(layer.get_parameter("weight"), 1.0)
    worker = Worker(ModuleEngine(model))
    stop, outputs = threading.Event(), set()

    def serve() -> None:
        with torch.no_grad():
            while not stop.is_set():
                outputs.add(float(model(torch.ones(8))[0]))

    thread = threading.Thread(target=serve)
    thread.start()
    allowed = {8.0**8, 16.0**8}
    try:
        for step in range(40):
            value = 1.0 + (step + 1) % 2
            new = {n: torch.full_like(t, value) for n, t in model.state_dict().items()}
            update(worker, Target.VERIFIER, new, version=str(step))
    finally:
        stop.set()
        thread.join()
    assert outputs <= allowed
    worker.close()


def test_a_forward_that_does_not_end_leaves_the_session_prepared(
    models: tuple[Tiny, Tiny],
) -> None:
    """Without a step boundary in time finish fails as unavailable, and may be called again."""
    verifier, _ = models
    engine = ModuleEngine(verifier)
    worker = Worker(engine)
    new = fresh(verifier.state_dict())
    session = worker.start(request())
    push(worker, session.session_id, Target.VERIFIER, new)
    running, done = threading.Event(), threading.Event()

    def long_step() -> None:
        with engine.gate.step(Target.VERIFIER):
            running.set()
            done.wait(30)

    thread = threading.Thread(target=long_step)
    thread.start()
    running.wait(30)
    with pytest.raises(EngineUnavailableError):
        worker.finish(session.session_id, timeout=0.05)
    assert worker.update(session.session_id).state is SessionState.PREPARED
    done.set()
    thread.join()
    worker.finish(session.session_id)
    assert unchanged(verifier, new)
    worker.close()


def test_the_cache_is_reset_after_the_last_write_and_before_the_next_step(
    models: tuple[Tiny, Tiny],
) -> None:
    """The reset sees the new weights, once per session; one that fails is told (B66, B67)."""
    verifier, _ = models
    new = fresh(verifier.state_dict())
    seen: list[bool] = []
    answers = iter([True, False])

    def reset() -> bool:
        seen.append(unchanged(verifier, new))
        return next(answers)

    worker = Worker(ModuleEngine(verifier, reset_cache=reset))
    assert update(worker, Target.VERIFIER, new, version="a").cache_reset is CacheReset.DONE
    assert update(worker, Target.VERIFIER, new, version="b").cache_reset is CacheReset.FAILED
    assert seen == [True, True]
    worker.close()


def test_engine_hooks_run_once_per_session_however_it_is_cut(models: tuple[Tiny, Tiny]) -> None:
    """One message or a hundred: the engine's rebuild runs once (B34, B36)."""
    verifier, _ = models
    calls: list[object] = []
    worker = Worker(ModuleEngine(verifier, rebuild=calls.append))
    new = fresh(verifier.state_dict())
    for count, cut in enumerate((None, 64, 7), start=1):
        session = worker.start(request(version=str(cut)))
        run = all_pieces(Target.VERIFIER, new, cut)
        send(worker, session.session_id, [[piece] for piece in run] if cut else [run])
        worker.finish(session.session_id)
        assert len(calls) == count
        assert unchanged(verifier, new)
    worker.close()


def test_engine_hooks_are_told_what_was_written(models: tuple[Tiny, Tiny]) -> None:
    """A rebuild gets the written parameters, under the names of every target that has them."""
    calls: list[object] = []
    worker = Worker(ModuleEngine(*models, rebuild=calls.append))
    tensors = {"head.weight": torch.zeros(10, 4), "fc.bias": torch.zeros(4)}
    update(worker, Target.VERIFIER, tensors, scope=Scope.PARTIAL)
    assert calls == [{Target.VERIFIER: {"head.weight", "fc.bias"}, Target.DRAFT: {"head.weight"}}]
    worker.close()


def test_a_compiled_forward_computes_with_the_new_weights() -> None:
    """torch.compile'd modules see an update without being compiled anew (B69)."""
    model = Tiny()
    compiled = cast("nn.Module", torch.compile(model, backend="eager"))
    compiled(TOKENS)
    worker = Worker(ModuleEngine(compiled))
    new = fresh(model.state_dict())
    update(worker, Target.VERIFIER, new)
    reference = Tiny()
    reference.load_state_dict(new)
    torch.testing.assert_close(compiled(TOKENS), reference(TOKENS))
    worker.close()


def test_models_made_under_inference_mode_can_be_written() -> None:
    """Tensors of inference mode, and leaves that require grad, are updated from any thread.

    B71.
    """
    with torch.inference_mode():
        model = Tiny()
    worker = Worker(ModuleEngine(model))
    new = fresh(state(model))
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(update(worker, Target.VERIFIER, new)))
    thread.start()
    thread.join()
    assert done
    assert unchanged(model, new)
    worker.close()


def test_non_contiguous_parameters_keep_their_strides() -> None:
    """A parameter that is a transposed view takes values by index, not by address (B47)."""
    model = nn.Linear(4, 6, bias=False)
    model.weight = nn.Parameter(torch.randn(4, 6).t())
    worker = Worker(ModuleEngine(model))
    pointer, new = model.weight.data_ptr(), torch.randn(6, 4)
    update(worker, Target.VERIFIER, {"weight": new})
    assert same_bits(model.weight, new)
    assert (model.weight.data_ptr(), model.weight.stride()) == (pointer, (1, 6))
    worker.close()


def test_non_persistent_buffers_are_never_touched(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """Persistent buffers are tensors of a target, the others are not even listed (B37)."""
    verifier, _ = models
    before = verifier.rot.clone()
    names = {t.name for t in worker.reader.tensors([Target.VERIFIER])}
    update(worker, Target.VERIFIER, fresh(verifier.state_dict()))
    assert "rbias" in names
    assert "rot" not in names
    assert same_bits(verifier.rot, before)


def test_finish_names_what_is_missing(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A FULL session without its head fails with its name, stays open, and can be completed.

    B13.
    """
    verifier, _ = models
    before, new = state(verifier), fresh(verifier.state_dict())
    session = worker.start(request())
    push(
        worker, session.session_id, Target.VERIFIER, {n: t for n, t in new.items() if n[:2] != "he"}
    )
    with pytest.raises(IncompleteError, match=r"head\.weight") as caught:
        worker.finish(session.session_id)
    assert caught.value.subjects == ("verifier:head.weight",)
    assert unchanged(verifier, before)
    push(worker, session.session_id, Target.VERIFIER, {"head.weight": new["head.weight"]})
    worker.finish(session.session_id)
    assert unchanged(verifier, new)


def test_a_partial_session_with_nothing_is_an_error(worker: Worker) -> None:
    """PARTIAL needs at least one tensor (B25, B33)."""
    session = worker.start(request(scope=Scope.PARTIAL))
    with pytest.raises(NothingAppliedError):
        worker.finish(session.session_id)


def test_a_partial_session_leaves_the_rest_alone(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """What was not sent is bit-equal before and after (B33, B35)."""
    verifier, _ = models
    before = state(verifier)
    new = torch.randn(4)
    update(worker, Target.VERIFIER, {"ln.bias": new}, scope=Scope.PARTIAL)
    assert unchanged(verifier, before | {"ln.bias": new})


def test_a_region_begun_must_be_completed(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """Half of a tensor that a PARTIAL session announced is not enough; sent anew it is (B65)."""
    verifier, _ = models
    before, new = state(verifier), torch.randn(4, 4)
    session = worker.start(request(scope=Scope.PARTIAL))
    half = list(pieces(Target.VERIFIER, "fc.weight", new, cut=30))
    send(worker, session.session_id, [half[:1]])
    with pytest.raises(IncompleteError, match=r"fc\.weight"):
        worker.finish(session.session_id)
    assert unchanged(verifier, before)
    send(worker, session.session_id, [[piece] for piece in half])
    worker.finish(session.session_id)
    assert unchanged(verifier, before | {"fc.weight": new})


def test_values_that_are_not_finite_are_refused_on_request(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """With check_finite a NaN is named before anything is live; without it NaN is a value (B35)."""
    verifier, _ = models
    before = state(verifier)
    bad = torch.tensor([1.0, float("nan"), 2.0, 3.0])
    session = worker.start(request(scope=Scope.PARTIAL, check_finite=True))
    push(worker, session.session_id, Target.VERIFIER, {"ln.weight": bad})
    with pytest.raises(NotFiniteError, match=r"ln\.weight"):
        worker.finish(session.session_id)
    assert unchanged(verifier, before)
    worker.abort(session.session_id)
    update(worker, Target.VERIFIER, {"ln.weight": bad}, scope=Scope.PARTIAL)
    assert unchanged(verifier, before | {"ln.weight": bad})


def test_a_second_session_of_the_same_names_wins(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """No cache by name or shape: two sessions in a row give the second's values (B34, B39)."""
    verifier, _ = models
    for seed in (1, 2):
        new = fresh(verifier.state_dict(), seed)
        update(worker, Target.VERIFIER, new, version=str(seed))
    assert unchanged(verifier, new)


def test_a_replaced_parameter_is_found_at_the_next_session(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """A parameter that somebody bound anew between sessions is updated where it is now."""
    verifier, _ = models
    verifier.fc.weight.data = verifier.fc.weight.data.clone()
    new = fresh(verifier.state_dict())
    update(worker, Target.VERIFIER, new)
    assert unchanged(verifier, new)


def arenas() -> list[str]:
    """Return the arenas that this process has mapped or open."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    # Listing the folder opens a descriptor that is gone afterwards.
    links = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return [line for line in (*maps, *(str(fd.readlink()) for fd in links)) if ARENA in line]


def test_nothing_of_an_ended_session_stays(models: tuple[Tiny, Tiny]) -> None:
    """After 50 sessions, committed, failed and aborted, nothing is mapped or counted (B74)."""
    verifier, _ = models
    gc.collect()
    before = len(arenas())
    worker = Worker(ModuleEngine(verifier))
    for step in range(50):
        session = worker.start(request(version=str(step)))
        push(worker, session.session_id, Target.VERIFIER, fresh(verifier.state_dict()))
        assert len(arenas()) > before
        if step % 3 == 0:
            worker.abort(session.session_id)
        elif step % 3 == 1:
            worker.finish(session.session_id)
        else:
            remove = worker.trace.add(failing_at("commit.parameter", "fc.weight"))
            with pytest.raises(CommitRolledBackError):
                worker.finish(session.session_id)
            remove()
    gc.collect()
    assert worker.staging_bytes == 0
    assert len(arenas()) <= before
    worker.close()


def test_events_tell_the_story(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A watcher sees started, prepared and committed, in order, with the version."""
    verifier, _ = models
    events = worker.watch()
    update(worker, Target.VERIFIER, fresh(verifier.state_dict()), version="seen")
    kinds = []
    while (event := events.next(timeout=5)) and event.kind is not EventKind.COMMITTED:
        kinds.append(event.kind)
    assert kinds == [EventKind.WATCHING, EventKind.STARTED, EventKind.PREPARED]
    assert event is not None
    assert event.weight_version == "seen"


def test_generation_stands_still_for_the_commit_only() -> None:
    """Forward passes go on while chunks arrive and while a session is prepared."""
    verifier, _ = tiny_pair()
    worker = Worker(ModuleEngine(verifier), limits=Limits(gate_timeout=5))
    session = worker.start(request())
    push(worker, session.session_id, Target.VERIFIER, fresh(verifier.state_dict()))
    verifier(TOKENS)
    worker.prepare(session.session_id)
    verifier(TOKENS)
    assert worker.finish(session.session_id).pause_seconds > 0
    worker.close()
