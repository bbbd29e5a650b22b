from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from weightsync.core.errors import EngineUnavailableError, QuarantinedError, UnsupportedError
from weightsync.core.types import Target
from weightsync.engines.vllm.gate import WorkerGate

SOON = 0.01


class Worker:
    """What the gate needs of a worker of vLLM."""

    device = torch.device("cpu")

    def execute_model(self, num_tokens: int) -> str | None:
        """Run the first half of a step; without tokens there is no second one."""
        if num_tokens < 0:
            raise RuntimeError("out of memory")
        return None if num_tokens else "nothing to do"

    def sample_tokens(self) -> str:
        """Run the second half."""
        return "tokens"

    def determine_available_memory(self) -> int:
        """Run the models at start."""
        return 1

    def compile_or_warm_up_model(self) -> int:
        """Run the models at start."""
        return 2

    def execute_dummy_batch(self) -> None:
        """Keep other ranks company."""


@contextmanager
def in_thread(target: object) -> Iterator[threading.Thread]:
    """Run something beside the block, and wait for its end behind it."""
    assert callable(target)
    thread = threading.Thread(target=target)
    thread.start()
    yield thread
    thread.join()


def is_open_to_others(gate: WorkerGate) -> bool:
    """Tell whether another thread could commit now."""
    found: list[bool] = []

    def attempt() -> None:
        try:
            with gate.exclusive(SOON):
                found.append(True)
        except (EngineUnavailableError, UnsupportedError):
            found.append(False)

    with in_thread(attempt):
        pass
    return found[0]


def test_a_step_ends_with_sampling() -> None:
    """Between the two halves of a step no commit is possible; before and after it is."""
    worker = Worker()
    gate = WorkerGate(worker, num_ranks=1)
    assert is_open_to_others(gate)
    assert worker.execute_model(3) is None
    assert not is_open_to_others(gate)
    assert worker.sample_tokens() == "tokens"
    assert is_open_to_others(gate)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_step_without_sampling_ends_by_itself(num_tokens: int) -> None:
    """An empty step, and one that fails, leave the gate open."""
    worker = Worker()
    gate = WorkerGate(worker, num_ranks=1)
    try:
        worker.execute_model(num_tokens)
    except RuntimeError:
        assert num_tokens < 0
    assert is_open_to_others(gate)


def test_a_step_that_was_given_up_ends_with_the_next() -> None:
    """A first half that no second one followed does not close the gate for ever."""
    worker = Worker()
    gate = WorkerGate(worker, num_ranks=1)
    worker.execute_model(1)
    worker.execute_model(1)
    worker.sample_tokens()
    assert is_open_to_others(gate)


def test_calls_keep_their_results() -> None:
    """What runs models at start passes through the gate."""
    worker = Worker()
    WorkerGate(worker, num_ranks=1)
    assert worker.determine_available_memory() == 1
    assert worker.compile_or_warm_up_model() == 2


def test_one_of_several_ranks_does_not_switch_alone() -> None:
    """Only a call that vLLM makes on all ranks has access, in its own thread."""
    gate = WorkerGate(Worker(), num_ranks=2)
    with pytest.raises(UnsupportedError, match="2 ranks"), gate.exclusive(SOON):
        pass
    with pytest.raises(UnsupportedError, match="can't stop alone"):
        gate.pause("me", SOON)
    with gate.driven():
        with gate.exclusive(SOON):
            pass
        assert not is_open_to_others(gate)


def test_a_quarantine_holds_the_only_rank() -> None:
    """A step waits until the target is healed, and fails nothing."""
    worker = Worker()
    gate = WorkerGate(worker, num_ranks=1)
    gate.quarantine(Target.VERIFIER, "torn")
    gate.quarantine(Target.DRAFT, "torn")
    results: list[str | None] = []
    with in_thread(lambda: results.append(worker.execute_model(0))) as step:
        gate.quarantine(Target.VERIFIER, None)
        step.join(SOON)
        assert not results
        assert is_open_to_others(gate)
        gate.quarantine(Target.DRAFT, None)
    assert results == ["nothing to do"]


def test_a_quarantine_fails_one_of_several_ranks() -> None:
    """There the step is refused, for it could never be healed while the others wait in it."""
    worker = Worker()
    gate = WorkerGate(worker, num_ranks=2)
    gate.quarantine(Target.VERIFIER, "torn")
    with pytest.raises(QuarantinedError, match="torn"):
        worker.execute_model(1)
