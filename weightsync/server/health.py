"""The standard health service, which orchestrators and load balancers ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast, final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weightsync.core.admission import Admission
from weightsync.core.errors import TooManyStreamsError
from weightsync.server.address import bind
from weightsync.server.silent import MAX_SILENT, SilentCalls
from weightsync.server.threads import DaemonThreadPool

MAX_WATCHERS = 8

_PROBES = 4
"""Threads of the port for probes that no watcher can take."""

_MAX_QUESTION_BYTES = 4096

SERVICES = frozenset({"", "weightsync.v1.WeightSync", "weightsync.v1.EngineControl"})
"""The whole process, and the services in it."""

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Tells whether the worker serves.

    grpcio's own servicer sends to its watchers from the thread that changes the state, under the
    lock that every check needs: one client that stops reading would hold up all.
    """

    def __init__(self, *, serving: bool) -> None:
        """Start with a state."""
        self._serving = serving
        self._changed = threading.Condition()
        self._closed = False
        self._watchers = Admission("health watchers", MAX_WATCHERS)

    def set_serving(self, serving: bool) -> None:  # noqa: FBT001 - a callback of one value
        """Change the state."""
        with self._changed:
            self._serving = serving
            self._changed.notify_all()

    def close(self) -> None:
        """End all watchers' streams; nothing serves any longer."""
        with self._changed:
            self._serving = False
            self._closed = True
            self._changed.notify_all()

    def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Tell the state now."""
        if request.service not in SERVICES:
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"no service {request.service[:64]!r} on this worker"
            )
        return self._answer(request.service)

    def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        """Tell the state now, and each time it changes."""
        context.add_callback(self._wake)
        try:
            with self._watchers:
                told = None
                while (answer := self._next(request.service, told, context)) is not None:
                    yield answer
                    told = answer
        except TooManyStreamsError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def _next(
        self,
        service: str,
        told: health_pb2.HealthCheckResponse | None,
        context: grpc.ServicerContext,
    ) -> health_pb2.HealthCheckResponse | None:
        """Wait for an answer that was not told yet; None when nobody is to be told any more."""

        def over() -> bool:
            return self._closed or not context.is_active()

        with self._changed:
            self._changed.wait_for(lambda: over() or self._answer(service) != told)
            return None if over() else self._answer(service)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in SERVICES:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self._serving else _Status.NOT_SERVING)


def handler(health: Health, silent: SilentCalls) -> grpc.GenericRpcHandler:
    """Return the handler of the service, for callers who may send no request."""
    Requests = Iterator[health_pb2.HealthCheckRequest]  # noqa: N806

    def check(requests: Requests, call: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
        return health.Check(silent.request(requests, call), call)

    def watch(
        requests: Requests, call: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        yield from health.Watch(silent.request(requests, call), call)

    parse, serialize = health_pb2.HealthCheckRequest.FromString, _Status.SerializeToString
    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health",
        {
            "Check": grpc.stream_unary_rpc_method_handler(check, parse, serialize),
            "Watch": grpc.stream_stream_rpc_method_handler(watch, parse, serialize),
        },
    )


@final
class HealthPort:
    """Answers for health alone, in plain text: probes have no certificate and no token.

    Attributes:
        address: Where.
    """

    def __init__(self, health: Health, host: str, port: int) -> None:
        """Start to answer.

        Raises:
            InvalidRequestError: the port can't be had.
        """
        self._pool = DaemonThreadPool(MAX_WATCHERS + _PROBES + MAX_SILENT, "weightsync-health")
        self._grpc = grpc.server(
            cast("ThreadPoolExecutor", self._pool),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_QUESTION_BYTES),
            ],
        )
        self._grpc.add_generic_rpc_handlers((handler(health, SilentCalls()),))
        shown = f"[{host}]" if ":" in host else host
        # What it tells, everybody may know.
        self.address = bind(self._grpc, f"{shown}:{port}", allow_insecure=True)
        self._grpc.start()

    def stop(self) -> None:
        """Stop, when the watchers have been told. Idempotent."""
        self._grpc.stop(None).wait()
        self._pool.shutdown()
