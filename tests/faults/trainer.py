"""A trainer in a process of its own: pushes one version and tells how it went."""

from __future__ import annotations

import json
import sys
from typing import Any

from weightsync_client import Fleet, FleetError, SendOptions, Worker

from tests.faults.weights import draft_weights, verifier_weights
from weightsync.core.errors import WeightSyncError
from weightsync.core.types import Target, UpdateMode


def push(order: dict[str, Any]) -> None:
    """Push what was ordered."""
    sources = {"verifier": verifier_weights, "draft": draft_weights}
    options = SendOptions(
        chunk_bytes=order["chunk_bytes"],
        patience=order["patience"],
        window_bytes=order["window_bytes"],
    )
    workers = [Worker(address, timeout=order["timeout"]) for address in order["addresses"]]
    with Fleet(workers).update(
        version=f"v{order['seed']}",
        target=order["targets"],
        mode=UpdateMode[order["mode"]],
        lease=order["lease"],
        options=options,
    ) as session:
        for name in order["targets"]:
            session.push(sources[name](order["seed"]), target=Target[name.upper()])


def main() -> None:
    """Read the order, push, and tell `{}` or the error."""
    result: dict[str, Any] = {}
    try:
        push(json.loads(sys.argv[1]))
    except FleetError as error:
        outcomes = [worker.outcome.value for worker in error.report.workers]
        result = {"error": "FleetError", "text": str(error), "outcomes": outcomes}
    except WeightSyncError as error:
        result = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(result), flush=True)  # noqa: T201 - how it talks


if __name__ == "__main__":
    main()
