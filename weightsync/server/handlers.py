"""Handlers for every rpc of a service, made from its descriptor."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from weightsync.core.admission import Admission
from weightsync.core.types import Limits
from weightsync.server.boundary import Admit, Boundary

MAX_WAITING_CALLS = 16
"""Most unary calls at once that may wait: for a step boundary, for streams to end, for a copy."""

RESERVED_THREADS = 8
"""Threads that only calls without waiting can take."""

_WAITING = frozenset(
    {
        "StartWeightUpdate",
        "PrepareWeightUpdate",
        "FinishWeightUpdate",
        "AbortWeightUpdate",
        "PauseGeneration",
        "Sleep",
        "WakeUp",
        "ResetPrefixCache",
    }
)


class Admissions:
    """Limits on calls that keep a thread waiting, so that no kind takes the threads of another.

    The worker itself limits those who read and those who watch.
    """

    def __init__(self, limits: Limits) -> None:
        """Take the limits of streams from the worker's."""
        # The worker counts streams too, but only from their first message on.
        self._streams = Admission("UpdateWeights streams", limits.max_streams)
        self._waiting = Admission("waiting calls", MAX_WAITING_CALLS)
        self.num_threads = (
            limits.max_streams
            + limits.max_readers
            + limits.max_watchers
            + MAX_WAITING_CALLS
            + RESERVED_THREADS
        )

    def of(self, method: MethodDescriptor) -> Admit:
        """Return the limit that a method falls under."""
        if method.client_streaming:
            return self._streams
        return self._waiting if method.name in _WAITING else nullcontext()


def service_handler(
    service: ServiceDescriptor, servicer: object, boundary: Boundary, admissions: Admissions
) -> grpc.GenericRpcHandler:
    """Return the handler of all rpcs of a service, each inside the boundary.

    The servicer has one method per rpc, `GetWorker` as `get_worker`; a missing one is an
    AttributeError here and not an UNIMPLEMENTED later.
    """
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {m.name: _method_handler(m, servicer, boundary, admissions) for m in service.methods},
    )


def _method_handler(
    method: MethodDescriptor, servicer: object, boundary: Boundary, admissions: Admissions
) -> grpc.RpcMethodHandler[Any, Any]:
    behavior = getattr(servicer, _snake_case(method.name))
    admit = admissions.of(method)
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(boundary.stream(method, behavior, admit))
    return grpc.stream_unary_rpc_method_handler(boundary.unary(method, behavior, admit))


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
