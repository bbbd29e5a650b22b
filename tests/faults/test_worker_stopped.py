"""A worker that is stopped in the middle of an update, well or badly, and one that comes back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from weightsync_client import Fleet, SendOptions, Worker, push_model
from weightsync_client.errors import ConnectionLostError

from tests.faults.conftest import addresses
from weightsync.core.errors import UnknownSessionError, WeightSyncError
from weightsync.core.types import Scope
from weightsync.testing.faults.child import until
from weightsync.testing.faults.processes import TrainerProcess, WorkerProcess
from weightsync.testing.faults.weights import draft_weights, verifier_weights

Start = Callable[..., WorkerProcess]
BOTH = ("verifier", "draft")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start workers that end with the test."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(WorkerProcess(*args, **options))


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address of each kind."""
    return addresses(tmp_path)[request.param]


def test_a_stop_without_grace_keeps_the_old_version(start: Start, address: str) -> None:
    """SIGTERM within a session: the worker ends well with the old weights and says so."""
    worker = start(address)
    worker.arm("chunk.completed", 10)
    with TrainerProcess(worker.address, seed=1, patience=0.5) as trainer:
        worker.wait_reached()
        worker.terminate()
        with Worker(worker.address) as asking:
            until(lambda: not serving(asking), "the worker drains")
        worker.go()
        last = worker.wait_stopped()
        result = trainer.result()
    assert last.holds(0, 0)
    assert not last.holdings["staging_bytes"]
    assert result["error"] in ("SessionStateError", "ConnectionLostError", "DeadlineError")


def serving(worker: Worker) -> bool:
    """Ask whether a worker takes sessions; one that is gone does not."""
    try:
        return worker.serving()
    except ConnectionLostError:
        return False


def test_a_stop_with_grace_lets_the_session_finish(start: Start, address: str) -> None:
    """SIGTERM within a session that finishes in time: the worker ends well with the new weights."""
    worker = start(address, grace=60.0)
    worker.arm("chunk.completed", 10)
    with TrainerProcess(worker.address, seed=1) as trainer:
        worker.wait_reached()
        worker.terminate()
        worker.go()
        assert trainer.result() == {}
    assert worker.wait_stopped().holds(1, 1)


def test_a_stop_waits_for_the_commit(start: Start, address: str) -> None:
    """SIGTERM within the commit: it goes through, and its trainer is told so."""
    worker = start(address)
    worker.arm("commit.parameter", 2)
    with TrainerProcess(worker.address, seed=1) as trainer:
        worker.wait_reached()
        worker.terminate()
        worker.go()
        assert trainer.result() == {}
    assert worker.wait_stopped().holds(1, 1)


def test_a_worker_that_comes_back_is_another_one(start: Start, address: str) -> None:
    """Killed and started again at its address, a worker is known by its id and has no session."""
    worker = start(address)
    where = worker.address
    options = SendOptions(chunk_bytes=8192, patience=60.0)
    with Worker(where, instance_id=worker.instance_id) as known, Worker(where) as any_worker:
        session = Fleet([any_worker]).update(version="v1", options=options)
        session.push({"fc.weight": verifier_weights(1)["fc.weight"]})
        session.settle()
        worker.kill()
        again = start(where)
        assert again.address == where
        assert again.instance_id != worker.instance_id
        with pytest.raises(ConnectionLostError, match=again.instance_id):
            until(lambda: known.info(wait=60.0), "the worker is found")
        session.push({"fc.bias": verifier_weights(1)["fc.bias"]})
        with pytest.raises(UnknownSessionError, match="restarted"):
            session.settle()
        session.abort()
        (verifier, _) = any_worker.info().targets
        assert not verifier.weight_version
        assert verifier.num_unwritten == verifier.num_tensors
        assert again.state().holds(0, 0)
        push_model([any_worker], verifier_weights(2), draft_weights(2), version="v2")
    assert again.state().holds(2, 2)


def test_a_killed_worker_is_told_within_the_patience(start: Start, address: str) -> None:
    """Killed within the commit and never seen again: the trainer is told, and does not hang."""
    worker = start(address)
    worker.arm("commit.parameter", 2)
    with TrainerProcess(worker.address, seed=1, patience=0.5, timeout=5.0) as trainer:
        worker.wait_reached()
        worker.kill()
        result = trainer.result()
    assert result["error"] in ("ConnectionLostError", "DeadlineError")
    assert worker.address in result["text"]


def test_a_draining_worker_refuses_new_sessions_only(start: Start, address: str) -> None:
    """While it drains, open sessions go on, reads are answered, and a start is refused clearly."""
    worker = start(address, grace=60.0)
    with Worker(worker.address) as asking:
        session = Fleet([asking]).update(version="v1", scope=Scope.PARTIAL)
        worker.terminate()
        until(lambda: not serving(asking), "the worker drains")
        with pytest.raises(WeightSyncError, match="stopping"):
            Fleet([asking]).update(version="v2", target="draft")
        session.push({"fc.bias": verifier_weights(1)["fc.bias"]})
        assert session.finish().committed
    worker.wait_stopped()


def test_two_workers_at_one_address_fail_loudly(start: Start, address: str) -> None:
    """The second worker at an address does not start, and the first one serves on."""
    first = start(address)
    command = [sys.executable, "-m", "weightsync.testing.faults.worker", first.address, "0", "0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode != 0
    assert "InvalidRequestError" in second.stderr
    with Worker(first.address, instance_id=first.instance_id) as asking:
        assert asking.info().instance_id == first.instance_id
