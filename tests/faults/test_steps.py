"""The lists of steps are those that a worker and a client really take."""

from __future__ import annotations

import itertools

import pytest
from weightsync_client import Fleet, Worker, push_model

import weightsync
from weightsync.core.errors import CommitFailedError, WeightSyncError
from weightsync.core.trace import CLIENT_STEPS, WORKER_STEPS, Hook, Trace
from weightsync.core.types import Target
from weightsync.testing.failpoints import FailpointError, raise_error
from weightsync.testing.faults.net import make_pair
from weightsync.testing.faults.weights import draft_weights, verifier_weights


def failing_at(event: str, times: int) -> Hook:
    """Return a hook that raises at an event, the first times."""
    count = itertools.count()

    def hook(name: str, _facts: dict[str, object]) -> None:
        if name == event and next(count) < times:
            raise_error()

    return hook


def test_every_step_is_listed_and_taken() -> None:
    """Sessions that fail in all ways tell of each event of the lists, and of no other."""
    seen: dict[str, set[str]] = {"worker": set(), "client": set()}
    worker_trace = Trace(lambda name, _: seen["worker"].add(name))
    client_trace = Trace(lambda name, _: seen["client"].add(name))
    weights = verifier_weights(1), draft_weights(1)
    with (
        weightsync.serve(*make_pair(0), trace=worker_trace) as server,
        Worker(server.address) as worker,
        Fleet([worker], trace=client_trace) as fleet,
    ):
        push_model(fleet, *weights, version="v1")
        for trace, event, times in (
            (worker_trace, "commit.parameter", 1),
            (worker_trace, "share.checked", 2),
            (worker_trace, "prepare.started", 1),
            (worker_trace, "chunk.started", 2),
            (client_trace, "worker.finish.started", 1),
            (client_trace, "message", 1),
        ):
            remove = trace.add(failing_at(event, times))
            with pytest.raises((WeightSyncError, FailpointError)) as raised:
                push_model(fleet, *weights, version="v2")
            remove()
            if event == "share.checked":
                # Taking it back failed as well.
                assert isinstance(raised.value, CommitFailedError)
                push_model(fleet, *weights, version="v3")
        # Nobody has finished this one.
        (busy,) = {status.session_id for status in worker.info().targets}
        with pytest.raises(WeightSyncError):
            fleet.update(version="v4", target=[Target.VERIFIER])
        worker.abort(busy)
    for side, steps in (("worker", WORKER_STEPS), ("client", CLIENT_STEPS)):
        assert seen[side] == {event for step in steps for event in step.events}
