"""A worker that lives through one fault after the other, and what must hold after each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

from weightsync_client import Worker, push_model

from tests.faults.net import answer, make_pair
from tests.faults.processes import State, WorkerProcess, until
from tests.faults.weights import draft_weights, verifier_weights
from weightsync.core.types import Target
from weightsync.core.views import TargetStatus

_seeds = itertools.count(1)


@functools.cache
def answers(seed: int) -> tuple[str, str]:
    """Return digests of what verifier and draft of one version compute."""
    verifier, draft = make_pair(seed)
    return answer(verifier), answer(draft)


class Scene:
    """A worker process and what it is known to hold.

    Attributes:
        worker: The process.
        old: Versions of verifier and draft.
    """

    def __init__(self, worker: WorkerProcess, seed: int = 0) -> None:
        self.worker = worker
        self._asking = Worker(worker.address)
        self.old = (seed, seed)
        self.push_new()
        # What one session of each kind leaves open for good is no leak of a later one.
        self._holdings = until(self._settled, "the worker settles")

    @staticmethod
    def new_seed() -> int:
        """Return the number of a version that nobody holds yet."""
        return next(_seeds)

    def push_new(self) -> None:
        """Commit a new version of both models from here, and see that it is live."""
        seed = self.new_seed()
        push_model(
            self.worker.address, verifier_weights(seed), draft_weights(seed), version=f"v{seed}"
        )
        self.old = (seed, seed)
        self.check(self.old)

    def targets(self) -> dict[Target, TargetStatus]:
        """Ask what the service says of its targets."""
        return {status.target: status for status in self._asking.info().targets}

    def expire(self) -> None:
        """Let leases run out until no session holds a target."""

        def free() -> bool:
            self.worker.expire()
            return not any(target.session_id for target in self.targets().values())

        until(free, "no session is open")

    def close(self) -> None:
        """Close the connection; the worker is not ours."""
        self._asking.close()

    def check(self, held: tuple[int, int]) -> State:
        """Assert that the worker holds exactly these versions, says so, and serves them."""
        told = {t: status.weight_version for t, status in self.targets().items()}
        if held != (0, 0):
            assert list(told.values()) == [f"v{seed}" for seed in held]
        assert self.worker.state().holds(*held)
        state = until(self._went_on, "the forward loop goes on")
        assert state.holds(*held)
        if held[0] == held[1]:
            verifier, draft = answers(held[0])
            assert state.answers == {"verifier": {verifier}, "draft": {draft}}
        return state

    def check_recovers(self) -> None:
        """Assert that the next update succeeds and that the fault has left nothing behind."""
        self.push_new()
        until(lambda: self._settled() == self._holdings, f"only {self._holdings} are left")

    def _went_on(self) -> State | None:
        state = self.worker.state()
        return state if state.rounds > 1 and not state.refused else None

    def _settled(self) -> dict[str, object] | None:
        holdings = self.worker.state().holdings
        quiet = not holdings["open_streams"] and not holdings["staging_bytes"]
        return holdings if quiet and "/memfd" not in _names(holdings["files"]) else None


def _names(files: Iterable[str]) -> set[str]:
    return {name.split("-")[0] for name in files}
