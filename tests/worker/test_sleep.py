"""Falling asleep and waking up, by the service's own calls and by an engine itself."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.worker.feeding import Tensors, fresh, push, raw, request, state, unchanged
from weightsync.core.errors import (
    EngineUnavailableError,
    QuarantinedError,
    SessionStateError,
    TargetBusyError,
    UnsupportedError,
)
from weightsync.core.trace import Trace
from weightsync.core.types import Limits, Scope, SessionState, Target, TargetState, UpdateMode
from weightsync.core.views import EventKind
from weightsync.engines.base import SleepWatcher
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import Tiny, tiny_pair

VERIFIER, DRAFT = Target.VERIFIER, Target.DRAFT
KEEP, DROP = 1, 2
TOKENS = torch.arange(10)
WENT = "the engine went to sleep"


class SelfSleeper:
    """An engine that is put to sleep by calls of its own, as inference engines are."""

    name, version = "self sleeper", "1"
    sleep_calls = "engine.nap() and engine.rise()"

    def __init__(self) -> None:
        self.models = tiny_pair()
        self._inner = inner = ModuleEngine(*self.models)
        self.coordinates, self.targets, self.gate = inner.coordinates, inner.targets, inner.gate
        self.committed = inner.committed

    def watch_sleep(self, watcher: SleepWatcher) -> None:
        """Tell a watcher from now on."""
        self._watcher = watcher

    def nap(self, level: int) -> None:
        """Free the memory."""
        with self._watcher.falling_asleep(drops=level == DROP):
            self._inner.sleep(level)

    def rise(self) -> None:
        """Bring it back."""
        with self._watcher.waking():
            self._inner.wake_up()


class Tagged(ModuleEngine):
    """An engine with a second kind of memory that sleeps."""

    def wake_up(self, tags: Collection[str] = ()) -> None:
        """Bring it back, or both."""
        if set(tags) != {"kv_cache"}:
            super().wake_up([tag for tag in tags if tag != "kv_cache"])


@pytest.fixture
def engine() -> SelfSleeper:
    """An engine with both models."""
    return SelfSleeper()


@pytest.fixture
def worker(engine: SelfSleeper) -> Iterator[Worker]:
    """The worker around it."""
    worker = Worker(engine)
    yield worker
    worker.close()


def states(worker: Worker) -> set[TargetState]:
    """Return the states of all targets."""
    return {status.state for status in worker.info().targets}


def both(engine: SelfSleeper, seed: int) -> dict[Target, Tensors]:
    """Return new tensors for both targets; what they share is the verifier's in both."""
    verifier, draft = (fresh(model.state_dict(), seed + i) for i, model in enumerate(engine.models))
    shared = {name: verifier[name] for name in ("embed.weight", "head.weight")}
    return {VERIFIER: verifier, DRAFT: draft | shared}


def commit(worker: Worker, models: Mapping[Target, Tensors], version: str, **more: object) -> None:
    """Run a session over all tensors of some targets."""
    session = worker.start(request(*models, version=version, **more))  # type: ignore[arg-type]
    for target, tensors in models.items():
        push(worker, session.session_id, target, tensors)
    worker.finish(session.session_id)


def test_a_sleep_of_the_engines_own_is_told(worker: Worker, engine: SelfSleeper) -> None:
    """Asleep there is no session, no reading, no health; after level 1 all is as before."""
    new = both(engine, 1)
    commit(worker, new, "v1")
    told: list[bool] = []
    worker.on_serving_change(told.append)
    engine.nap(KEEP)
    assert states(worker) == {TargetState.ASLEEP}
    assert told == [False]
    with pytest.raises(EngineUnavailableError, match="sleeps"):
        worker.start(request(version="v2"))
    with pytest.raises(EngineUnavailableError, match="sleeps"):
        list(worker.reader.digests([VERIFIER], []))
    assert list(worker.reader.tensors([VERIFIER]))
    engine.rise()
    assert states(worker) == {TargetState.READY}
    assert told == [False, True]
    assert {status.weight_version for status in worker.info().targets} == {"v1"}
    assert all(unchanged(model, new[t]) for t, model in zip(new, engine.models, strict=True))
    commit(worker, both(engine, 3), "v2")


def test_a_deep_sleep_of_the_engines_own_is_healed(worker: Worker, engine: SelfSleeper) -> None:
    """After level 2 both targets are unset, unwritten and quarantined until FULL sessions."""
    commit(worker, both(engine, 1), "v1")
    events = worker.watch()
    engine.nap(DROP)
    assert {status.weight_version for status in worker.info().targets} == {""}
    engine.rise()
    for status in worker.info().targets:
        assert (status.state, status.weight_version) == (TargetState.QUARANTINED, "")
        assert status.num_unwritten == status.num_tensors
        assert "dropped by a sleep" in status.quarantine_reason
    _watching, event = events.next(0), events.next(0)
    assert event is not None
    assert event.kind is EventKind.QUARANTINED
    assert event.targets == {VERIFIER, DRAFT}
    with pytest.raises(QuarantinedError):
        engine.models[0](TOKENS)
    with pytest.raises(QuarantinedError, match="FULL"):
        worker.start(request(scope=Scope.PARTIAL))
    new = both(engine, 5)
    commit(worker, {VERIFIER: new[VERIFIER]}, "v2")
    assert states(worker) == {TargetState.READY, TargetState.QUARANTINED}
    commit(worker, new, "v3")
    assert states(worker) == {TargetState.READY}
    assert all(unchanged(model, new[t]) for t, model in zip(new, engine.models, strict=True))
    engine.models[1](TOKENS)


@pytest.mark.parametrize("level", [KEEP, DROP])
def test_buffers_of_both_models_survive(worker: Worker, engine: SelfSleeper, level: int) -> None:
    """Persistent or not, buffers are there when the engine wakes; outputs are the old ones.

    B72.
    """
    for i, model in enumerate(engine.models):
        model.rot.copy_(torch.randn(4))
        model.rbias.fill_(i + 0.5)
    weights = {t: state(m) for t, m in zip((VERIFIER, DRAFT), engine.models, strict=True)}
    buffers = [(raw(m.rot).tobytes(), raw(m.rbias).tobytes()) for m in engine.models]
    outputs = [raw(model(TOKENS)) for model in engine.models]
    engine.nap(level)
    engine.rise()
    after = [(raw(m.rot).tobytes(), raw(m.rbias).tobytes()) for m in engine.models]
    assert after == buffers
    if level == DROP:
        commit(worker, weights, "again")
    assert [raw(model(TOKENS)) for model in engine.models] == outputs


def test_an_open_session_ends_with_the_cause(worker: Worker, engine: SelfSleeper) -> None:
    """Whoever has a session open learns why it is over, at each call, and may start again."""
    new = both(engine, 1)
    events = worker.watch()
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, dict(list(new[VERIFIER].items())[:2]))
    engine.nap(KEEP)
    ended = worker.update(session.session_id)
    assert (ended.state, ended.end_reason) == (SessionState.ABORTED, WENT)
    for call in (
        lambda: push(worker, session.session_id, VERIFIER, new[VERIFIER]),
        lambda: worker.prepare(session.session_id),
        lambda: worker.finish(session.session_id),
    ):
        with pytest.raises(SessionStateError, match=WENT):
            call()
    engine.rise()
    seen = [events.next(0) for _ in range(3)]
    assert [(e.kind, e.cause) for e in seen if e] == [
        (EventKind.WATCHING, ""),
        (EventKind.STARTED, ""),
        (EventKind.ABORTED, WENT),
    ]
    assert worker.staging_bytes == 0
    commit(worker, new, "v1")


def test_a_session_in_place_leaves_the_engine_quarantined(
    worker: Worker, engine: SelfSleeper
) -> None:
    """Its target is torn when the engine sleeps, and still so when it wakes, until it is healed."""
    new = both(engine, 1)
    session = worker.start(request(mode=UpdateMode.IN_PLACE))
    push(worker, session.session_id, VERIFIER, {"fc.bias": new[VERIFIER]["fc.bias"]})
    engine.nap(KEEP)
    assert states(worker) == {TargetState.ASLEEP}
    engine.rise()
    verifier = worker.info().targets[0]
    assert verifier.state is TargetState.QUARANTINED
    assert WENT in verifier.quarantine_reason
    commit(worker, new, "v1", mode=UpdateMode.IN_PLACE)
    assert states(worker) == {TargetState.READY}
    engine.models[0](TOKENS)


def test_a_commit_under_way_comes_first(engine: SelfSleeper) -> None:
    """An engine that falls asleep while a commit waits for its step keeps the new weights."""
    new = both(engine, 1)
    at_the_gate = threading.Event()

    def hook(step: str, _facts: dict[str, object]) -> None:
        if step == "commit.started":
            at_the_gate.set()

    worker = Worker(engine, trace=Trace(hook))
    session = worker.start(request(VERIFIER, DRAFT))
    for target, tensors in new.items():
        push(worker, session.session_id, target, tensors)
    with ThreadPoolExecutor(2) as pool:
        with engine.gate.step(VERIFIER):
            finished = pool.submit(worker.finish, session.session_id)
            at_the_gate.wait()
            asleep = pool.submit(engine.nap, KEEP)
            assert worker.update(session.session_id).state is not SessionState.ABORTED
        assert finished.result().session.state is SessionState.COMMITTED
        asleep.result()
    assert states(worker) == {TargetState.ASLEEP}
    engine.rise()
    assert all(unchanged(model, new[t]) for t, model in zip(new, engine.models, strict=True))
    worker.close()


def test_memory_is_not_freed_under_a_reader(worker: Worker, engine: SelfSleeper) -> None:
    """The message that is put together is finished first; the next one is refused."""
    seen: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        naps: list[Future[None]] = []

        def encode(*_parts: object) -> bytes:
            naps.append(pool.submit(engine.nap, DROP))
            while states(worker) != {TargetState.ASLEEP}:
                pass
            seen.append(engine.models[0].embed.weight.untyped_storage().nbytes())
            return b""

        with pytest.raises(EngineUnavailableError, match="sleeps"):
            list(worker.reader.read(VERIFIER, [], encode))
        naps[0].result()
    assert seen == [10 * 4 * 4]
    assert engine.models[0].embed.weight.untyped_storage().nbytes() == 0
    engine.rise()


def test_a_session_that_starts_while_the_engine_falls_asleep(
    worker: Worker, engine: SelfSleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is aborted like others, and holds neither generation nor readers behind that."""
    pause = engine.gate.pause
    with ThreadPoolExecutor(1) as pool:
        naps: list[Future[None]] = []

        def pausing(owner: str, timeout: float) -> None:
            if not naps:
                naps.append(pool.submit(engine.nap, KEEP))
            pause(owner, timeout)

        monkeypatch.setattr(engine.gate, "pause", pausing)
        session = worker.start(request(mode=UpdateMode.IN_PLACE))
        naps[0].result()
    assert worker.update(session.session_id).state is SessionState.ABORTED
    engine.rise()
    engine.models[0](TOKENS)
    assert list(worker.reader.digests([VERIFIER], []))


def test_a_start_that_gets_no_step_boundary_leaves_nothing(engine: SelfSleeper) -> None:
    """An IN_PLACE session that could not be opened holds up neither readers nor a sleep."""
    worker = Worker(engine, limits=Limits(gate_timeout=0.01))
    with (
        ThreadPoolExecutor(1) as pool,
        engine.gate.step(VERIFIER),
        pytest.raises(EngineUnavailableError, match="boundary"),
    ):
        pool.submit(worker.start, request(mode=UpdateMode.IN_PLACE)).result()
    assert list(worker.reader.digests([VERIFIER], []))
    engine.nap(KEEP)
    engine.rise()
    commit(worker, both(engine, 1), "v1")
    worker.close()


def test_a_sleep_that_fails_changes_nothing(worker: Worker, engine: SelfSleeper) -> None:
    """The targets are what they were, and serve."""
    commit(worker, both(engine, 1), "v1")
    with pytest.raises(UnsupportedError, match="7"):
        engine.nap(7)
    assert states(worker) == {TargetState.READY}
    assert worker.serving
    assert worker.info().targets[0].weight_version == "v1"
    engine.models[0](TOKENS)


def test_the_service_leaves_it_to_the_engine(worker: Worker) -> None:
    """Who asks the service for a sleep that it can't bring about is told what to call."""
    assert not {"Sleep", "WakeUp"} & set(worker.info().controls)
    with pytest.raises(UnsupportedError, match=r"engine\.nap\(\) and engine\.rise\(\)"):
        worker.switch.sleep(KEEP)
    with pytest.raises(UnsupportedError, match=r"engine\.nap\(\) and engine\.rise\(\)"):
        worker.switch.wake_up()


def test_a_sleep_by_the_service_waits_for_sessions() -> None:
    """A caller does not end the session of another one by mistake."""
    worker = Worker(ModuleEngine(Tiny()))
    session = worker.start(request(holder="trainer-7"))
    with pytest.raises(TargetBusyError, match=session.session_id):
        worker.switch.sleep(DROP)
    assert states(worker) == {TargetState.READY}
    worker.abort(session.session_id)
    worker.switch.sleep(DROP)
    worker.close()


def test_weights_may_come_back_before_the_rest() -> None:
    """An update fits between waking the weights and waking what else sleeps."""
    model = Tiny()
    worker = Worker(Tagged(model))
    new = fresh(model.state_dict())
    worker.switch.sleep(DROP)
    worker.switch.wake_up(["kv_cache"])
    assert states(worker) == {TargetState.ASLEEP}
    worker.switch.wake_up(["weights"])
    assert states(worker) == {TargetState.QUARANTINED}
    commit(worker, {VERIFIER: new}, "v1")
    worker.switch.wake_up(["kv_cache"])
    assert states(worker) == {TargetState.READY}
    assert unchanged(model, new)
    worker.close()


def test_an_unknown_tag_wakes_nothing() -> None:
    """It is refused by name, with and without one that is known, and the engine sleeps on."""
    worker = Worker(ModuleEngine(Tiny()))
    worker.switch.sleep(DROP)
    for tags in (["wieghts"], ["weights", "wieghts"]):
        with pytest.raises(UnsupportedError, match="'wieghts'"):
            worker.switch.wake_up(tags)
        assert states(worker) == {TargetState.ASLEEP}
    worker.switch.wake_up()
    assert states(worker) == {TargetState.QUARANTINED}
    worker.close()
