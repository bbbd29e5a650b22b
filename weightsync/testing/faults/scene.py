"""A worker that lives through one fault after the other, and what must hold after each."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterable

from weightsync_client import Worker, push_model

from weightsync.core.types import Target, TargetState
from weightsync.core.views import TargetStatus
from weightsync.testing.faults.child import promise, until
from weightsync.testing.faults.net import answer, fill, make_pair
from weightsync.testing.faults.processes import BOTH, State, WorkerProcess
from weightsync.testing.faults.weights import draft_weights, verifier_weights

Versions = tuple[int, int]
"""What verifier and draft are."""

_seeds = itertools.count(1)


class Verdict(enum.Enum):
    """What a worker holds after a fault."""

    OLD = "old"
    NEW = "new"
    QUARANTINED = "quarantined"
    RESTARTED = "restarted"


@functools.lru_cache(64)
def answers(versions: Versions) -> tuple[str, str]:
    """Return digests of what verifier and draft of some versions compute."""
    verifier, draft = make_pair(versions[0])
    fill(draft, draft_weights(versions[1]))
    return answer(verifier), answer(draft)


def updated(old: Versions, seed: int, targets: Iterable[str]) -> Versions:
    """Return what a worker holds once an update of some targets is committed."""
    verifier, draft = (
        seed if name in targets else was for name, was in zip(BOTH, old, strict=True)
    )
    return verifier, draft


class Scene:
    """A worker process and what it is known to hold.

    Attributes:
        worker: The process.
        old: Versions of verifier and draft.
    """

    def __init__(self, worker: WorkerProcess) -> None:
        """Bring the worker to a version, and see what it needs for that."""
        self.worker = worker
        self._asking = Worker(worker.address)
        self.old: Versions = (0, 0)
        self.check(self.old)
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

    def check(self, held: Versions) -> State:
        """See that the worker holds exactly these versions, says so, and serves them."""
        told = tuple(status.weight_version for status in self.targets().values())
        names = tuple(f"v{seed}" if seed else "" for seed in held)
        promise(told == names, f"the worker says {told}, not {names}")
        before = self.worker.state()
        promise(before.holds(*held), f"the worker holds {held}: {before}")
        state = until(self._went_on, "the forward loop goes on")
        promise(state.holds(*held), f"the worker still holds {held}: {state}")
        computed = {name: {digest} for name, digest in zip(BOTH, answers(held), strict=True)}
        promise(state.answers == computed, f"the models compute as {held}: {state}")
        return state

    def verdict(self, seed: int, targets: Iterable[str]) -> Verdict:
        """Tell what became of an update, and see that it is one of the things that may.

        Args:
            seed: The version that it was to bring.
            targets: Of which models.
        """
        statuses = self.targets().values()
        state = self.worker.state()
        promise(state.shared, f"what both models have in common is one storage: {state}")
        new = updated(self.old, seed, targets)
        self._check_computed(state, new)
        if any(status.state is TargetState.QUARANTINED for status in statuses):
            for status in statuses:
                held = status.state is not TargetState.QUARANTINED
                said = status.quarantine_reason and not status.weight_version
                promise(held or said, f"a quarantined target says so and has no version: {status}")
            until(lambda: self.worker.state().refused, "forwards of a quarantined target stop")
            return Verdict.QUARANTINED
        found = Verdict.NEW if state.holds(*new) else Verdict.OLD
        self.check(new if found is Verdict.NEW else self.old)
        return found

    def check_recovers(self) -> None:
        """See that the next update succeeds and that the fault has left nothing behind."""
        self.push_new()
        self.check_clean()

    def check_clean(self) -> None:
        """See that no thread, file, arena, stream or staged byte is left of what has ended."""
        last: list[object] = []

        def clean() -> bool:
            last[:] = [self._settled()]
            return last[0] == self._holdings

        try:
            until(clean, f"only {self._holdings} are left")
        except AssertionError as error:
            raise type(error)(f"{error}; there are {last[0]}") from None

    def _check_computed(self, state: State, new: Versions) -> None:
        """See that all that was computed since the last look was of the old or the new version."""
        pairs = zip(BOTH, answers(self.old), answers(new), strict=True)
        for name, *whole in pairs:
            torn = state.answers[name] - set(whole)
            promise(not torn, f"the {name} computed with torn weights: {state}")

    def _went_on(self) -> State | None:
        state = self.worker.state()
        return state if state.rounds > 1 and not state.refused else None

    def _settled(self) -> dict[str, object] | None:
        holdings = self.worker.state().holdings
        quiet = not holdings["open_streams"] and not holdings["staging_bytes"]
        return holdings if quiet and "/memfd" not in _names(holdings["files"]) else None


def _names(files: Iterable[str]) -> set[str]:
    return {name.split("-")[0] for name in files}
