"""Every step of a session fails once: the old version stays whole, or the new one is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weightsync_client import Worker, push_model

import weightsync
from weightsync.core.errors import WeightSyncError
from weightsync.core.trace import Trace
from weightsync.testing.failpoints import Failpoint, raise_error
from weightsync.testing.faults.net import are_shared, live_weights, make_pair
from weightsync.testing.faults.weights import draft_weights, fingerprint, verifier_weights

STEPS = [
    "session.started",
    "stream.started",
    "stream.completed",
    "chunk.started",
    "chunk.completed",
    "prepare.started",
    "prepare.completed",
    "commit.started",
    "commit.parameter",
    "share.checked",
    "commit.completed",
    "session.ended",
]
HAPPENED = ("completed", "ended", "session.started")
"""How steps end that no hook can stop any more."""


class Pair:
    """A served pair that is asked directly what it holds."""

    def __init__(self, trace: Trace) -> None:
        self.models = make_pair(0)
        self.server = weightsync.serve(*self.models, trace=trace, shared_memory=False)
        self.worker = Worker(self.server.address)

    def held(self) -> tuple[str, str]:
        """Return digests of what verifier and draft hold."""
        verifier, draft = live_weights(*self.models)
        return fingerprint(verifier), fingerprint(draft)

    def expire(self) -> None:
        """Let a session that was left behind end, as it does when its lease is over."""
        books = self.server.worker._books
        with books.lock:
            for session in books.table.open_sessions():
                session.expires = 0.0
        books.expire()

    def push(self, seed: int) -> None:
        """Push a version of both."""
        push_model(
            [self.worker],
            verifier_weights(seed),
            draft_weights(seed),
            version=f"v{seed}",
        )


@pytest.fixture
def trace() -> Trace:
    """Takes the failpoints."""
    return Trace()


@pytest.fixture
def pair(trace: Trace) -> Iterator[Pair]:
    """A pair that holds version 1."""
    pair = Pair(trace)
    with pair.server, pair.worker:
        pair.push(1)
        yield pair


def version(seed: int) -> tuple[str, str]:
    """Return digests of a version of both."""
    return fingerprint(verifier_weights(seed)), fingerprint(draft_weights(seed))


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_leaves_one_whole_version(
    pair: Pair, trace: Trace, step: str, nth: int
) -> None:
    """Whatever step fails, both models hold one version, the service says which, and go on."""
    failpoint = Failpoint(step, raise_error, nth=nth)
    remove = trace.add(failpoint.hook)
    try:
        pair.push(2)
        failed = False
    except WeightSyncError:
        failed = True
    finally:
        remove()
    told = {status.weight_version for status in pair.worker.info().targets}
    assert len(told) == 1
    (seed,) = (int(name.removeprefix("v")) for name in told)
    assert pair.held() == version(seed)
    assert failed or seed == 2
    assert are_shared(*pair.models)
    pair.expire()
    pair.push(3)
    assert pair.held() == version(3)
    if nth == 1:
        assert failpoint.reached.is_set()
        assert failed != step.endswith(HAPPENED)
