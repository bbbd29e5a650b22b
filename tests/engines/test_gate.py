from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from weightsync.core.errors import EngineUnavailableError, QuarantinedError
from weightsync.core.types import Target
from weightsync.engines.gate import StepGate

V, D = Target.VERIFIER, Target.DRAFT
LONG = 60.0
X = torch.zeros(1, 2)


class Slow(nn.Module):
    """A model whose forward pass lasts until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = threading.Semaphore(0)
        self.end = threading.Semaphore(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Say that it began; wait."""
        self.inside.release()
        assert self.end.acquire(timeout=LONG)
        return x


class Plain(nn.Module):
    """A model that dynamo traces like any user's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Do some arithmetic."""
        out: torch.Tensor = self.fc(x)
        return out.relu()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that must have ended with the test."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def gate() -> StepGate:
    """A gate without models."""
    return StepGate()


def test_a_writer_waits_for_the_forward_pass_in_flight(
    gate: StepGate, pool: ThreadPoolExecutor
) -> None:
    """Exclusive access begins when the running forward has ended, not before."""
    model = Slow()
    gate.attach(model, V)
    forward = pool.submit(model, X)
    model.inside.acquire()
    with pytest.raises(EngineUnavailableError, match="a forward pass is still running"):
        gate.exclusive(0).__enter__()
    model.end.release()
    with gate.exclusive(LONG):
        forward.result(LONG)


def test_forwards_of_several_threads_run_side_by_side(
    gate: StepGate, pool: ThreadPoolExecutor
) -> None:
    """The gate takes no forward's turn: two are inside at the same time."""
    model = Slow()
    gate.attach(model, V)
    both = [pool.submit(model, X) for _ in range(2)]
    assert model.inside.acquire(timeout=LONG)
    assert model.inside.acquire(timeout=LONG)
    model.end.release(2)
    for forward in both:
        forward.result(LONG)


def test_no_forward_begins_during_exclusive_access(
    gate: StepGate, pool: ThreadPoolExecutor
) -> None:
    """Threads that call the model in a loop never see a half-written pair."""
    pair = [0, 0]
    torn: list[tuple[int, int]] = []
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            with gate.step(V):
                if pair[0] != pair[1]:
                    torn.append((pair[0], pair[1]))

    threads = [pool.submit(generate) for _ in range(3)]
    for i in range(200):
        with gate.exclusive(LONG):
            pair[0] = i
            pair[1] = i
    stop.set()
    for thread in threads:
        thread.result(LONG)
    assert not torn


def test_a_waiting_writer_holds_new_forwards(gate: StepGate, pool: ThreadPoolExecutor) -> None:
    """While a writer waits for one thread, another thread's forward does not overtake it."""
    model, order = Slow(), list[str]()
    gate.attach(model, V)
    first = pool.submit(model, X)
    model.inside.acquire()

    def write() -> None:
        with gate.exclusive(LONG):
            order.append("write")

    def step() -> None:
        with gate.step(D):
            order.append("step")

    writer = pool.submit(write)
    with gate._changed:
        assert gate._changed.wait_for(lambda: gate._waiting_writers or writer.done(), LONG)
    reader = pool.submit(step)
    model.end.release()
    for job in (first, writer, reader):
        job.result(LONG)
    assert order == ["write", "step"]


def test_a_nested_forward_passes_a_waiting_writer(gate: StepGate, pool: ThreadPoolExecutor) -> None:
    """A model that calls the other one inside its forward can't deadlock with a commit."""
    draft = Slow()
    gate.attach(draft, D)
    outer = nn.Sequential(draft)
    gate.attach(outer, V)
    forward = pool.submit(outer, X)
    draft.inside.acquire()
    with pytest.raises(EngineUnavailableError):
        gate.exclusive(0).__enter__()
    draft.end.release()
    forward.result(LONG)
    with gate.exclusive(0):
        pass


def test_the_writer_may_run_the_model_itself(gate: StepGate) -> None:
    """A hook under the gate may call forwards and ask for the gate again."""
    model = nn.Linear(2, 2)
    gate.attach(model, V)
    with gate.exclusive(LONG), gate.exclusive(0):
        model(X)


def test_a_forward_that_fails_leaves_the_gate_open(gate: StepGate) -> None:
    """An exception inside a forward does not count as a forward that runs for ever."""
    model = nn.Linear(3, 3)
    gate.attach(model, V)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(X)
    with gate.exclusive(0):
        pass


def test_an_interrupted_forward_is_forgotten_at_the_next_one(gate: StepGate) -> None:
    """Ctrl-C goes past torch's hooks; the thread's next forward mends the count."""

    class Interrupted(nn.Module):
        armed = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.armed:
                raise KeyboardInterrupt
            return x

    model = Interrupted()
    gate.attach(model, V)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model.armed = False
    model(X)
    with gate.exclusive(0):
        pass


def test_pause_is_held_once_per_owner(gate: StepGate, pool: ThreadPoolExecutor) -> None:
    """Pausing twice needs one resume; two owners need one resume each; commits work meanwhile."""
    model = nn.Linear(2, 2)
    gate.attach(model, V)
    gate.pause("a", 0)
    gate.pause("a", 0)
    gate.pause("b", 0)
    forward = pool.submit(model, X)
    with gate.exclusive(LONG):
        pass
    gate.resume("a")
    gate.resume("a")
    with gate.exclusive(LONG):
        assert not forward.done()
    gate.resume("b")
    forward.result(LONG)


def test_a_pause_that_times_out_holds_nothing(gate: StepGate, pool: ThreadPoolExecutor) -> None:
    """After a refused pause, generation goes on as if nobody had asked."""
    model = Slow()
    gate.attach(model, V)
    forward = pool.submit(model, X)
    model.inside.acquire()
    with pytest.raises(EngineUnavailableError):
        gate.pause("a", 0)
    model.end.release(2)
    forward.result(LONG)
    pool.submit(model, X).result(LONG)


def test_quarantine_refuses_one_target_only(gate: StepGate) -> None:
    """The reason is in the error; the other model serves on; None heals."""
    verifier, draft = nn.Linear(2, 2), nn.Linear(2, 2)
    gate.attach(verifier, V)
    gate.attach(draft, D)
    gate.quarantine(D, "half of it was written")
    with pytest.raises(QuarantinedError, match=r"draft.*half of it was written"):
        draft(X)
    verifier(X)
    gate.quarantine(D, None)
    draft(X)
    with gate.exclusive(0):
        pass


def test_a_refused_nested_forward_leaves_the_outer_one_running(gate: StepGate) -> None:
    """A verifier that catches its draft's refusal still counts as running."""
    draft = nn.Linear(2, 2)
    gate.attach(draft, D)
    gate.quarantine(D, "stale")

    with gate.step(V):
        with pytest.raises(QuarantinedError):
            draft(X)
        with pytest.raises(EngineUnavailableError):
            gate.exclusive(0).__enter__()
    with gate.exclusive(0):
        pass


def _wrapped(gate: StepGate) -> nn.Module:
    model = torch.compile(Plain(), backend="eager")
    assert isinstance(model, nn.Module)
    gate.attach(model, V)
    return model


def _inner(gate: StepGate) -> nn.Module:
    inner = Plain()
    gate.attach(inner, V)
    model = torch.compile(inner, backend="eager", fullgraph=True)
    assert isinstance(model, nn.Module)
    return model


def _in_place(gate: StepGate) -> nn.Module:
    model = Plain()
    model.compile(backend="eager")
    gate.attach(model, V)
    return model


@pytest.mark.parametrize("make", [_wrapped, _inner, _in_place])
def test_compiled_models_ask_at_each_call(
    gate: StepGate, make: Callable[[StepGate], nn.Module]
) -> None:
    """Compilation neither fails on the hooks nor bakes one answer into the graph."""
    model = make(gate)
    model(X)
    gate.quarantine(V, "stale")
    with pytest.raises(QuarantinedError):
        model(X)
    gate.quarantine(V, None)
    model(X)
    with gate.exclusive(0):
        pass


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_gate_works_without_gradients(gate: StepGate, mode: Callable[[], object]) -> None:
    """Forwards under `inference_mode` and `no_grad` are gated as others."""
    model = nn.Linear(2, 2)
    gate.attach(model, V)
    gate.quarantine(V, "stale")
    with mode(), pytest.raises(QuarantinedError):  # type: ignore[attr-defined]
        model(X)


def test_a_gated_model_can_be_copied_and_released(gate: StepGate) -> None:
    """A deep copy works although the gate holds a lock, and detach takes all hooks away."""
    model = nn.Linear(2, 2)
    gate.attach(model, V)
    copy.deepcopy(model)(X)
    gate.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
