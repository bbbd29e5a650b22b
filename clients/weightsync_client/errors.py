"""What can go wrong on this side of the wire, and what the other side said."""

from __future__ import annotations

from typing import cast

import grpc
from grpc_status import rpc_status

from weightsync.core.errors import WeightSyncError
from weightsync.wire.status import error_of, error_of_code

# A worker of ours always says why: a bare code comes from the connection.
_CUT = frozenset({"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL"})


class ConnectionLostError(WeightSyncError):
    """The worker can't be reached, or the connection was cut."""


class DeadlineError(WeightSyncError):
    """The worker did not answer in time, or took nothing for too long."""


def from_rpc(error: grpc.RpcError, worker: str) -> WeightSyncError:
    """Return the error that a call had, with the worker's address as metadata `worker`."""
    # What gRPC raises is always the call as well, which its types can't say.
    call = cast("grpc.Call", error)
    status = rpc_status.from_call(call)
    if status is None:
        found = error_of_code(call.code().value[0], call.details() or "")
    else:
        found = error_of(status)
    # error_of_code says which code it was given; errors with a reason have none.
    code = found.metadata.get("code", "")
    if code in _CUT:
        return ConnectionLostError(f"{worker}: {found}", worker=worker, code=code)
    if code == "DEADLINE_EXCEEDED":
        return DeadlineError(f"{worker}: no answer in time ({found})", worker=worker, code=code)
    found.metadata.setdefault("worker", worker)
    return found
