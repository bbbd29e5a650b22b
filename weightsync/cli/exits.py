"""Exit codes: one per kind of error, derived from the contract's status codes."""

from __future__ import annotations

from collections.abc import Mapping

from google.rpc.code_pb2 import Code
from weightsync_client import ConnectionLostError, DeadlineError, FleetError

from weightsync.core.errors import WeightSyncError
from weightsync.wire.status import CODES

DIFFERENT = 1
"""The answer is no: weights differ, a worker does not serve. Nothing went wrong."""

USAGE = 2
"""Unknown options and missing arguments, as every command line has it."""

UNFIT = 3
PARTLY_COMMITTED = 9
INTERNAL = 70

EXIT_CODES: Mapping[int, int] = {
    Code.INVALID_ARGUMENT: UNFIT,
    Code.ALREADY_EXISTS: UNFIT,
    Code.NOT_FOUND: 4,
    Code.UNIMPLEMENTED: 4,
    Code.FAILED_PRECONDITION: 5,
    Code.ABORTED: 6,
    Code.RESOURCE_EXHAUSTED: 6,
    Code.UNAVAILABLE: 7,
    Code.DEADLINE_EXCEEDED: 7,
    Code.INTERNAL: 8,
    Code.DATA_LOSS: 8,
    Code.UNAUTHENTICATED: 10,
    Code.PERMISSION_DENIED: 10,
}
"""Exit code of each status code that a `Reason` has."""

MEANINGS: Mapping[int, str] = {
    0: "done",
    DIFFERENT: "the answer is no: weights differ, a check failed",
    USAGE: "the command was called wrongly",
    UNFIT: "what was given does not fit: a checkpoint, a shape, an option's value",
    4: "there is no such tensor, target or ability",
    5: "not as things stand: incomplete, shared weight, quarantined",
    6: "somebody else was first, or there is no room: try again",
    7: "the worker can't be reached, is stopping, or did not answer in time",
    8: "the worker failed",
    PARTLY_COMMITTED: "some workers hold the new version and others do not: push again",
    10: "not allowed: the worker wants a token, or one with another scope",
    INTERNAL: "a fault of weightsync itself",
    130: "interrupted",
}
"""What each exit code says."""


def exit_code(error: WeightSyncError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, FleetError):
        return PARTLY_COMMITTED
    if isinstance(error, ConnectionLostError | DeadlineError):
        return EXIT_CODES[Code.UNAVAILABLE]
    return EXIT_CODES[CODES[error.reason]]
