"""A trainer in a process of its own: pushes versions and tells how it went."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from weightsync_client import Fleet, FleetError, SendOptions, Worker

from weightsync.core.errors import WeightSyncError
from weightsync.core.trace import Trace
from weightsync.core.types import Target, UpdateMode
from weightsync.testing.failpoints import FailpointError
from weightsync.testing.faults.armed import Armed
from weightsync.testing.faults.talk import obey, tell
from weightsync.testing.faults.weights import draft_weights, verifier_weights

SOURCES = {"verifier": verifier_weights, "draft": draft_weights}


def push(
    trace: Trace,
    *,
    addresses: Sequence[str],
    seed: int,
    targets: Sequence[str],
    mode: str,
    timeout: float,
    options: dict[str, Any],
    update: dict[str, Any],
) -> dict[str, Any]:
    """Push one version; return `{}` or the error."""
    workers = [Worker(address, timeout=timeout) for address in addresses]
    try:
        with Fleet(workers, trace=trace).update(
            version=f"v{seed}",
            target=targets,
            mode=UpdateMode[mode],
            options=SendOptions(**options),
            **update,
        ) as session:
            for name in targets:
                session.push(SOURCES[name](seed), target=Target[name.upper()])
    except FleetError as error:
        outcomes = [worker.outcome.value for worker in error.report.workers]
        return {"error": "FleetError", "text": str(error), "outcomes": outcomes}
    except (WeightSyncError, FailpointError) as error:
        told = getattr(error, "metadata", {})
        return {"error": type(error).__name__, "text": str(error), "metadata": told}
    finally:
        for worker in workers:
            worker.close()
    return {}


def main() -> None:
    """Push what is ordered, one after the other."""
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    trace = Trace()
    armed = Armed(trace)
    obey({"push": lambda **order: orders.put(order), "arm": armed.arm, "go": armed.go})
    while True:
        tell("result", push(trace, **orders.get()))


if __name__ == "__main__":
    main()
