"""The trainer's side: puts new weights into running inference workers.

    from weightsync_client import Fleet, push_model

    push_model("10.0.0.1:50051", model, version="step-100")

Importing this package imports neither grpc nor torch: names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_client.catching_up import catch_up
    from weightsync_client.compare import Difference, VerifyReport, verify
    from weightsync_client.credentials import Credentials
    from weightsync_client.errors import ConnectionLostError, DeadlineError
    from weightsync_client.fleet import Fleet
    from weightsync_client.member import SendOptions
    from weightsync_client.names import NameMapping
    from weightsync_client.progress import Progress
    from weightsync_client.push import push_model
    from weightsync_client.repairing import repair
    from weightsync_client.report import FleetError, FleetReport, Outcome, WorkerReport
    from weightsync_client.session import Session, Ticket
    from weightsync_client.shards import Array, Shard
    from weightsync_client.sources.checkpoint import Checkpoint
    from weightsync_client.vllm_server import VllmServer
    from weightsync_client.worker import Worker, connect

__all__ = [
    "Array",
    "Checkpoint",
    "ConnectionLostError",
    "Credentials",
    "DeadlineError",
    "Difference",
    "Fleet",
    "FleetError",
    "FleetReport",
    "NameMapping",
    "Outcome",
    "Progress",
    "SendOptions",
    "Session",
    "Shard",
    "Ticket",
    "VerifyReport",
    "VllmServer",
    "Worker",
    "WorkerReport",
    "catch_up",
    "connect",
    "push_model",
    "repair",
    "verify",
]

_MODULES = {
    "Array": "shards",
    "Checkpoint": "sources.checkpoint",
    "ConnectionLostError": "errors",
    "Credentials": "credentials",
    "DeadlineError": "errors",
    "Difference": "compare",
    "Fleet": "fleet",
    "FleetError": "report",
    "FleetReport": "report",
    "NameMapping": "names",
    "Outcome": "report",
    "Progress": "progress",
    "SendOptions": "member",
    "Session": "session",
    "Shard": "shards",
    "Ticket": "session",
    "VerifyReport": "compare",
    "VllmServer": "vllm_server",
    "Worker": "worker",
    "WorkerReport": "report",
    "catch_up": "catching_up",
    "connect": "worker",
    "push_model": "push",
    "repair": "repairing",
    "verify": "compare",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
