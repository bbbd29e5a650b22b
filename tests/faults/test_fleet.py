"""One update of three workers, of which one has bad luck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from weightsync_client import Fleet, FleetError, Outcome, SendOptions, Session, Worker
from weightsync_client.errors import ConnectionLostError, DeadlineError

from weightsync.core.errors import TargetBusyError, WeightSyncError
from weightsync.core.types import Target
from weightsync.testing.faults.processes import WorkerProcess
from weightsync.testing.faults.relay import Relay
from weightsync.testing.faults.weights import draft_weights, verifier_weights

BOTH = [Target.VERIFIER, Target.DRAFT]
OPTIONS = SendOptions(chunk_bytes=8192, patience=1.0)
LOST = (ConnectionLostError, DeadlineError)


class Trio:
    """Three workers, the third one behind a relay, and the fleet of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        started = [WorkerProcess("127.0.0.1:0") for _ in range(3)]
        self.workers = [stack.enter_context(worker) for worker in started]
        self.relay = stack.enter_context(Relay(self.workers[2].address, folder))
        ways = [*(worker.address for worker in self.workers[:2]), self.relay.address]
        asking = [stack.enter_context(Worker(way, timeout=5.0)) for way in ways]
        self.fleet = stack.enter_context(Fleet(asking))
        self.push(1)

    @property
    def unlucky(self) -> WorkerProcess:
        """The third worker."""
        return self.workers[2]

    def restart(self) -> None:
        """Start the third worker again, at its address, with the weights it was built with."""
        again = WorkerProcess(self.unlucky.address)
        self.workers[2] = self._stack.enter_context(again)
        # A channel that found nobody rests for a while before it looks again.
        self.fleet.workers[2].info(wait=60.0)

    def open(self, seed: int) -> Session:
        """Open a session of both targets and push a version."""
        session = self.fleet.update(version=f"v{seed}", target=BOTH, options=OPTIONS)
        session.push(verifier_weights(seed), target=Target.VERIFIER)
        session.push(draft_weights(seed), target=Target.DRAFT)
        return session

    def push(self, seed: int) -> None:
        """Bring all workers to a version."""
        assert self.open(seed).finish().committed
        assert self.held(seed) == [True, True, True]

    def held(self, seed: int) -> list[bool]:
        """Tell of each worker whether it holds exactly a version."""
        return [worker.state().holds(seed, seed) for worker in self.workers]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Three workers that hold the same; each test leaves them so."""
    with ExitStack() as stack:
        yield Trio(tmp_path_factory.mktemp("fleet"), stack)


def outcomes(error: FleetError) -> list[Outcome]:
    """Return what each worker made of the update."""
    return [worker.outcome for worker in error.report.workers]


def versions(error: FleetError) -> list[str]:
    """Return what each worker's verifier is said to hold."""
    held = [worker.weight_versions for worker in error.report.workers]
    return [versions.get(Target.VERIFIER, "?") for versions in held]


def test_a_worker_that_dies_before_prepare_stops_all(trio: Trio) -> None:
    """B63: while bytes are on their way, the death of one keeps the old version on the others."""
    trio.push(2)
    session = trio.open(3)
    trio.unlucky.kill()
    with pytest.raises(WeightSyncError) as caught:
        session.finish()
    assert trio.relay.address in str(caught.value)
    assert trio.workers[0].state().holds(2, 2)
    assert trio.workers[1].state().holds(2, 2)
    trio.restart()
    trio.push(4)


def test_a_worker_that_dies_in_prepare_stops_all(trio: Trio) -> None:
    """B63: what others have prepared is dropped when one can't be prepared."""
    trio.push(5)
    session = trio.open(6)
    session.settle()
    trio.unlucky.arm("prepare.completed")
    with when_held(trio.unlucky, trio.unlucky.kill), pytest.raises(LOST):
        session.finish()
    assert trio.workers[0].state().holds(5, 5)
    assert trio.workers[1].state().holds(5, 5)
    trio.restart()
    trio.push(7)


@pytest.mark.parametrize("step", ["commit.started", "commit.parameter", "session.ended"])
def test_a_worker_that_dies_in_finish_is_named(trio: Trio, step: str) -> None:
    """B63: lost between prepare and the end of finish, one is unknown, and the report says so."""
    trio.push(8)
    session = trio.open(9)
    session.settle()
    trio.unlucky.arm(step)
    with when_held(trio.unlucky, trio.unlucky.kill), pytest.raises(FleetError) as caught:
        session.finish()
    assert outcomes(caught.value) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.UNKNOWN]
    assert versions(caught.value) == ["v9", "v9", "?"]
    assert trio.workers[0].state().holds(9, 9)
    assert trio.workers[1].state().holds(9, 9)
    trio.restart()
    with pytest.raises(FleetError) as again:
        session.finish()
    assert outcomes(again.value) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.NOT_COMMITTED]
    trio.push(10)


def test_a_worker_that_was_out_of_reach_is_asked_again(trio: Trio) -> None:
    """B63: lost within finish and found again, it is asked what it did when finish is repeated."""
    trio.push(11)
    session = trio.open(12)
    session.settle()
    trio.unlucky.arm("commit.started")

    def vanish() -> None:
        trio.relay.refuse()
        trio.relay.cut()
        trio.unlucky.go()

    with when_held(trio.unlucky, vanish), pytest.raises(FleetError) as caught:
        session.finish()
    assert outcomes(caught.value) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.UNKNOWN]
    trio.relay.accept()
    assert session.finish().committed
    assert trio.held(12) == [True, True, True]


def test_a_busy_worker_stops_the_start(trio: Trio) -> None:
    """B63: one worker that is held by somebody else keeps the others from being opened for long."""
    trio.push(15)
    with Worker(trio.unlucky.address) as direct:
        other = Fleet([direct]).update(version="other", holder="somebody else")
        with pytest.raises(TargetBusyError, match="somebody else"):
            trio.open(16)
        for way in trio.fleet.workers[:2]:
            assert [status.session_id for status in way.info().targets] == ["", ""]
        other.abort()
    trio.push(16)


@contextmanager
def when_held(worker: WorkerProcess, act: Callable[[], object]) -> Iterator[None]:
    """Act as soon as a worker is held, while the block runs."""

    def wait() -> None:
        worker.wait_reached()
        act()

    with ThreadPoolExecutor() as pool:
        acting = pool.submit(wait)
        yield
        acting.result()
