"""The lists of steps are those that a worker and a client really take."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from weightsync_client import Fleet, Worker, push_model

import weightsync
from weightsync.core.errors import (
    CommitFailedError,
    CommitRolledBackError,
    IncompleteError,
    SessionStateError,
    TargetBusyError,
    UnknownTensorError,
)
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


def send(fleet: Fleet, tensor: tuple[str, Any]) -> None:
    """Update the draft with one tensor."""
    with fleet.update(version="broken", target=Target.DRAFT) as session:
        session.push([tensor])
        session.settle()


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
        remove = worker_trace.add(failing_at("commit.parameter", 1))
        with pytest.raises(CommitRolledBackError):
            push_model(fleet, *weights, version="v2")
        remove()
        # To take it back fails as well.
        remove = worker_trace.add(failing_at("share.checked", 2))
        with pytest.raises(CommitFailedError):
            push_model(fleet, *weights, version="v3")
        remove()
        push_model(fleet, *weights, version="v4")
        bias = weights[1]["fc.bias"]
        with pytest.raises(IncompleteError):
            send(fleet, ("fc.bias", bias))

        def abort(name: str, facts: dict[str, object]) -> None:
            if name == "chunk.started":
                server.worker.abort(str(facts["session_id"]))

        remove = worker_trace.add(abort)
        with pytest.raises(SessionStateError):
            send(fleet, ("fc.bias", bias))
        remove()
        with pytest.raises(UnknownTensorError):
            send(fleet, ("fc.bais", bias))
        client_trace.add(failing_at("worker.finish.started", 1))
        with pytest.raises(FailpointError):
            push_model(fleet, *weights, version="v5")
        # Nobody has finished it, and nobody else may come in between.
        (busy,) = {status.session_id for status in worker.info().targets}
        with pytest.raises(TargetBusyError):
            fleet.update(version="v6", target=Target.VERIFIER)
        worker.abort(busy)
    for side, steps in (("worker", WORKER_STEPS), ("client", CLIENT_STEPS)):
        assert seen[side] == {event for step in steps for event in step.events}
