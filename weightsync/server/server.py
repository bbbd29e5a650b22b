"""A running server around a worker."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import cast, final

import grpc
from structlog.typing import FilteringBoundLogger

from weightsync.core.arena_socket import PREFIX
from weightsync.core.types import Limits
from weightsync.server import health, reflection
from weightsync.server.access import Access
from weightsync.server.address import bind, is_local
from weightsync.server.boundary import Boundary
from weightsync.server.control import EngineControlService
from weightsync.server.handlers import Admissions, service_handler
from weightsync.server.logs import trace_log
from weightsync.server.metrics import Metrics
from weightsync.server.service import WeightSyncService
from weightsync.server.settings import ServerConfig
from weightsync.server.silent import MAX_SILENT, SilentCalls
from weightsync.server.streams import OpenStreams
from weightsync.server.threads import DaemonThreadPool
from weightsync.server.tls import server_credentials
from weightsync.server.tokens import TokenFile
from weightsync.server.tracing import make_tracing
from weightsync.server.watched import Watched
from weightsync.server.worker import Worker
from weightsync.v1 import engine_control_pb2, weight_sync_pb2

HANDSHAKE_SECONDS = 10.0
"""How long a connection may take to say who it is; gRPC alone would give it two minutes."""

LAST_CALLS_SECONDS = 2.0
"""How long calls that still run get, once the sessions have ended."""


@final
class Server:
    """Serves a worker over gRPC from the moment it is made until `stop`.

    Use as a context manager, or call `stop`.

    Attributes:
        worker: What is served.
        address: Where, in the form that clients connect to.
    """

    def __init__(self, worker: Worker, config: ServerConfig, log: FilteringBoundLogger) -> None:
        """Start to serve.

        Raises:
            InvalidRequestError: an address can't be had, or is not allowed; a file for TLS or
                with tokens can't be used; or tracing is wanted and not installed.
        """
        credentials = server_credentials(config, log)
        tokens = Watched([config.tokens], TokenFile.parse, log) if config.tokens else None
        access = Access(tokens)
        tracing = make_tracing(enabled=config.tracing)
        self.worker = worker
        self._log = log
        self._stopped = threading.Event()
        self._stopping = threading.Lock()
        admissions = Admissions(worker.limits)
        self._streams = OpenStreams(worker.limits.default_lease)
        self._health = health.Health(serving=worker.serving)
        self._pool = DaemonThreadPool(
            admissions.num_threads + MAX_SILENT + health.MAX_WATCHERS + reflection.MAX_STREAMS,
            "weightsync",
        )
        self._grpc = grpc.server(
            cast("ThreadPoolExecutor", self._pool), options=_options(worker.limits)
        )
        silent = SilentCalls()
        boundary = Boundary(log, access, tracing.follow, silent)
        self._grpc.add_generic_rpc_handlers(
            (
                service_handler(
                    weight_sync_pb2.DESCRIPTOR.services_by_name["WeightSync"],
                    WeightSyncService(worker, self._streams, access),
                    boundary,
                    admissions,
                ),
                service_handler(
                    engine_control_pb2.DESCRIPTOR.services_by_name["EngineControl"],
                    EngineControlService(worker),
                    boundary,
                    admissions,
                ),
            )
        )
        self._grpc.add_generic_rpc_handlers((health.handler(self._health, silent),))
        if config.reflection or (config.reflection is None and is_local(config.address)):
            reflection.add_reflection(self._grpc)
        self._metrics = Metrics(worker, config)
        self._probes: health.HealthPort | None = None
        try:
            if config.health_port is not None:
                self._probes = health.HealthPort(
                    self._health, config.health_host, config.health_port
                )
            self.address = bind(
                self._grpc,
                config.address,
                allow_insecure=config.allow_insecure,
                credentials=credentials,
                tokens=tokens is not None,
            )
        except BaseException:
            self._close_ports()
            raise
        if config.shared_memory:
            worker.lending.listen(f"{PREFIX}{worker.instance_id}")
        self._hooks = [
            worker.trace.add(hook)
            for hook in (trace_log(log), self._metrics.hook, self._end_streams, *tracing.hooks)
        ]
        worker.on_serving_change(self._health.set_serving)
        self._grpc.start()
        log.info("server.started", address=self.address, instance_id=worker.instance_id)

    @property
    def metrics_address(self) -> str | None:
        """Where `/metrics` listens, as `HOST:PORT`; None if it does not."""
        return self._metrics.address

    @property
    def health_address(self) -> str | None:
        """Where health answers in plain text, as `HOST:PORT`; None if only beside the services."""
        return self._probes.address if self._probes else None

    def stop(self, grace: float = 10.0) -> None:
        """Take no new sessions, let the open ones finish, and stop. Idempotent.

        Args:
            grace: Seconds that open sessions get; what is not committed then is aborted, and the
                old weights serve on.
        """
        with self._stopping:
            if self._stopped.is_set():
                return
            self._log.info("server.stopping", grace=grace)
            self.worker.drain()
            self.worker.close(grace)
            self._health.close()
            self._grpc.stop(LAST_CALLS_SECONDS).wait()
            self._pool.shutdown()
            self._close_ports()
            for remove in self._hooks:
                remove()
            self._log.info("server.stopped")
            self._stopped.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped; False if it has not within `timeout` seconds."""
        return self._stopped.wait(timeout)

    def __enter__(self) -> Server:
        """Return the server, which serves already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; without grace if the block failed."""
        self.stop(0.0 if error else 10.0)

    def __repr__(self) -> str:
        """Return address and state."""
        state = "stopped" if self._stopped.is_set() else "serving"
        return f"<weightsync.Server {state} at {self.address}>"

    def _close_ports(self) -> None:
        """Close what listens beside the services."""
        self._metrics.close()
        if self._probes is not None:
            self._probes.stop()

    def _end_streams(self, name: str, facts: dict[str, object]) -> None:
        if name == "session.ended":
            self._streams.session_ended(str(facts["session_id"]))


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        # Two servers on one port must fail loudly, not share the callers.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        # A host that vanished without a word is found out within 50 seconds.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
        # Clients may ping, also while no data flows, and are not cut off for it.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ]
