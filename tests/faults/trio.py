"""Three workers and a fleet of them; the third one has bad luck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from weightsync_client import Fleet, FleetError, Outcome, SendOptions, Session, Worker
from weightsync_client.errors import ConnectionLostError, DeadlineError

from weightsync.core.types import Target
from weightsync.testing.faults.processes import WorkerProcess
from weightsync.testing.faults.relay import Relay
from weightsync.testing.faults.weights import draft_weights, verifier_weights

BOTH = [Target.VERIFIER, Target.DRAFT]
LOST = (ConnectionLostError, DeadlineError)
OPTIONS = SendOptions(chunk_bytes=8192, patience=1.0)


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

    def restart(self, index: int = 2) -> None:
        """Start a worker again, at its address, with the weights it was built with."""
        again = WorkerProcess(self.workers[index].address)
        self.workers[index] = self._stack.enter_context(again)
        # A channel that found nobody rests for a while before it looks again.
        self.fleet.workers[index].info(wait=60.0)

    def open(self, seed: int, **update: Any) -> Session:
        """Open a session of both targets and push a version."""
        session = self.fleet.update(version=f"v{seed}", target=BOTH, options=OPTIONS, **update)
        session.push(verifier_weights(seed), target=Target.VERIFIER)
        session.push(draft_weights(seed), target=Target.DRAFT)
        return session

    def push(self, seed: int) -> None:
        """Bring all workers to a version."""
        assert self.open(seed).finish().committed
        assert self.held(seed) == [True, True, True]

    def told(self) -> list[str]:
        """Return what each worker says that its verifier holds."""
        return [worker.info().targets[0].weight_version for worker in self.fleet.workers]

    def held(self, seed: int) -> list[bool]:
        """Tell of each worker whether it holds exactly a version."""
        return [worker.state().holds(seed, seed) for worker in self.workers]


def outcomes(error: FleetError) -> list[Outcome]:
    """Return what each worker made of the update."""
    return [worker.outcome for worker in error.report.workers]


def versions(error: FleetError) -> list[str]:
    """Return what each worker's verifier is said to hold."""
    held = [worker.weight_versions for worker in error.report.workers]
    return [versions.get(Target.VERIFIER, "?") for versions in held]


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
