from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm import LLM
from vllm.v1.worker.cpu_worker import CPUWorker
from weightsync_client import Fleet, Session, Worker, verify

from tests.vllm import checkpoints
from tests.vllm.drafts import PAIRS, Made
from tests.vllm.engine import address_of, generate, running, worker_of
from tests.vllm.proof import see
from tests.vllm.test_drafts import BOTH, push_both
from tests.vllm.test_processes import SHORT, fresh_tokens, in_processes, push
from weightsync.core.errors import (
    EngineUnavailableError,
    QuarantinedError,
    SessionStateError,
    UnsupportedError,
)
from weightsync.core.types import Scope, SessionState, TargetState
from weightsync.core.views import TargetStatus
from weightsync.integrations.vllm.clients import LLMClient


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a verifier and an EAGLE draft."""
    return PAIRS["eagle"].make(tmp_path_factory.mktemp("pair"), 1)


@pytest.fixture(scope="module")
def llm(pair: Made) -> Iterator[LLM]:
    """Run one vLLM for several tests, each of which leaves it awake with the weights of `pair`."""
    with running(pair.verifier, **pair.options) as llm:
        push_both(llm, pair, "first")
        yield llm


@pytest.fixture
def fleet(llm: LLM) -> Iterator[Fleet]:
    """Find that vLLM as a trainer does."""
    with Fleet([address_of(llm)]) as fleet:
        yield fleet


def statuses(fleet: Fleet) -> list[TargetStatus]:
    """Return what the worker says of its targets."""
    return list(fleet.workers[0].info().targets)


def states(fleet: Fleet) -> set[TargetState]:
    """Return the states of the targets of the only worker."""
    return states_of(fleet.workers[0])


def states_of(worker: Worker) -> set[TargetState]:
    """Return the states of a worker's targets."""
    return {status.state for status in worker.info().targets}


def part(fleet: Fleet, made: Made) -> Session:
    """Return an open session of which a part has arrived."""
    session = fleet.update(version="never", target=BOTH)
    session.push({"model.norm.weight": made.verifier_tensors["model.norm.weight"]}, target=BOTH[0])
    session.settle()
    return session


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_is_seen_by_trainers(llm: LLM, fleet: Fleet, pair: Made, level: int) -> None:
    """While vLLM sleeps it takes no session and shows no weights; awake, all is as before.

    On the CPU vLLM frees nothing at any level, so nothing is reported as lost.
    """
    before = see(llm)
    worker = fleet.workers[0]
    llm.sleep(level)
    assert states(fleet) == {TargetState.ASLEEP}
    assert not worker.serving()
    with pytest.raises(EngineUnavailableError, match="sleeps"):
        fleet.update(version="never", target=BOTH)
    with pytest.raises(EngineUnavailableError, match="sleeps"):
        verify(fleet, pair.verifier_tensors)
    assert list(worker.tensors())
    llm.wake_up()
    assert states(fleet) == {TargetState.READY}
    assert worker.serving()
    assert {status.weight_version for status in statuses(fleet)} == {"first"}
    assert see(llm) == before
    push_both(llm, pair, "first")


def test_an_open_session_ends_when_vllm_sleeps(llm: LLM, fleet: Fleet, pair: Made) -> None:
    """The trainer learns the cause at its next call, and the old tokens are served."""
    before = see(llm)
    session = part(fleet, pair)
    llm.sleep(1)
    llm.wake_up()
    ended = fleet.workers[0].session(session.ticket.session_ids[0])
    assert (ended.state, ended.end_reason) == (
        SessionState.ABORTED,
        "the engine went to sleep",
    )
    with pytest.raises(SessionStateError, match="the engine went to sleep"):
        session.finish()
    assert see(llm) == before


def test_the_service_puts_nothing_to_sleep(llm: LLM, fleet: Fleet) -> None:
    """The scheduler must know of a sleep, so the service names vLLM's own calls instead."""
    worker = fleet.workers[0]
    assert not {"Sleep", "WakeUp"} & set(worker.info().controls)
    with pytest.raises(UnsupportedError, match="vLLM's own sleep"):
        worker.control.sleep(1)
    with pytest.raises(UnsupportedError, match="vLLM's own sleep"):
        worker.control.wake_up(["weights"])
    assert states(fleet) == {TargetState.READY}
    assert not llm.llm_engine.is_sleeping()


# Each derives something else from its weights, packed and plain.
LOST = [("eagle", "packed"), ("deepseek", "plain"), ("dflash", "plain")]


@pytest.mark.parametrize(("kind", "weights"), LOST, indirect=["weights"])
def test_lost_weights_are_told_and_sent_anew(
    tmp_path: Path, kind: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sleep that drops weights, sessions between the two wakes make a fresh engine.

    Until then both targets are unset, unwritten and quarantined. B72.
    """
    old, new = (PAIRS[kind].make(tmp_path / str(seed), seed) for seed in (1, 2))
    monkeypatch.setattr(CPUWorker, "sleep", drop_weights)
    with running(old.verifier, **old.options) as llm, Fleet([address_of(llm)]) as fleet:
        # What lets a worker free its memory; the CPU refuses it at the start.
        config = worker_of(llm).vllm_config.model_config
        monkeypatch.setattr(config, "enable_sleep_mode", True)
        push_both(llm, old, "old")
        see(llm)
        llm.sleep(2)
        assert {status.weight_version for status in statuses(fleet)} == {""}
        llm.wake_up(["weights"])
        assert worker_of(llm).get_model().model.norm.weight.isnan().all()
        for status in statuses(fleet):
            assert (status.state, status.weight_version) == (TargetState.QUARANTINED, "")
        assert not any(t.written for t in fleet.workers[0].tensors() if t.regions)
        with pytest.raises(QuarantinedError, match="FULL"):
            fleet.update(version="never", scope=Scope.PARTIAL)
        push_both(llm, new, "new")
        assert states(fleet) == {TargetState.READY}
        llm.wake_up(["kv_cache"])
        assert not llm.llm_engine.is_sleeping()
        after = see(llm)
    with running(new.verifier, **new.options) as llm:
        assert see(llm) == after


def test_ranks_sleep_and_wake_together(
    llama: Path, new: checkpoints.Tensors, tmp_path: Path
) -> None:
    """Several ranks are healed between the two wakes; a step that comes before that fails.

    It can't wait as it does on one rank: the commit needs a call of vLLM's between two steps.
    """
    ranks = {"tensor_parallel_size": 2}
    with in_processes(llama, tmp_path / "ranks", **ranks) as (llm, fleet):
        llm.collective_rpc("lose_weights_asleep")
        with Fleet.from_vllm(LLMClient(llm)) as together:
            llm.sleep(2)
            assert [states_of(worker) for worker in fleet.workers] == [{TargetState.ASLEEP}] * 2
            with pytest.raises(EngineUnavailableError, match="sleeps"):
                push(together, new)
            llm.wake_up(["weights"])
            sick = [{TargetState.QUARANTINED}] * 2
            assert [states_of(worker) for worker in fleet.workers] == sick
            push(together, new)
            assert [states_of(worker) for worker in fleet.workers] == [{TargetState.READY}] * 2
            llm.wake_up(["kv_cache"])
            after = generate(llm, num_tokens=SHORT)
            llm.sleep(2)
            llm.wake_up()
            with pytest.raises(RuntimeError, match="dropped by a sleep"):
                generate(llm, num_tokens=SHORT)
    assert after == fresh_tokens(tmp_path / "new", new)


def drop_weights(worker: Any, level: int = 1) -> None:
    """Do what a device does that unmaps the memory of weights; vLLM brings buffers back itself."""
    if level != 2:
        return
    for model in (worker.get_model(), worker.get_draft_model()):
        for tensor in tensors_that_are_lost(model):
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else -1)


def tensors_that_are_lost(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, and what modules keep beside them and did not register as buffers."""
    kept = {_storage(buffer) for buffer in model.buffers()}
    for module in model.modules():
        beside = {name: held for name, held in vars(module).items() if name != "kv_cache"}
        for held in (*module.parameters(recurse=False), *beside.values()):
            for tensor in held if isinstance(held, list | tuple) else (held,):
                if isinstance(tensor, torch.Tensor) and _storage(tensor) not in kept:
                    yield tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
