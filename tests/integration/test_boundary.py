from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from tests.integration.raw import code_of, told
from weightsync.core.errors import (
    MalformedPayloadError,
    QuarantinedError,
    Reason,
    TooManyStreamsError,
    WeightSyncError,
)
from weightsync.core.types import Limits
from weightsync.server.access import Access
from weightsync.server.boundary import Boundary
from weightsync.server.control import EngineControlService
from weightsync.server.handlers import MAX_WAITING_CALLS, Admissions, service_handler
from weightsync.server.logs import LogFormat, make_logger
from weightsync.server.service import WeightSyncService
from weightsync.server.tracing import Tracing
from weightsync.v1 import engine_control_pb2, weight_sync_pb2

SERVICES = (
    weight_sync_pb2.DESCRIPTOR.services_by_name["WeightSync"],
    engine_control_pb2.DESCRIPTOR.services_by_name["EngineControl"],
)
RPCS = [method for service in SERVICES for method in service.methods]


class Servicer:
    """Has every method; each does the same."""

    def __init__(self, behavior: Callable[[Any, grpc.ServicerContext], Any]) -> None:
        self._behavior = behavior

    def __getattr__(self, name: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        return self._behavior


Serve = Callable[[Callable[[Any, grpc.ServicerContext], Any]], grpc.Channel]


@pytest.fixture
def log() -> io.StringIO:
    """What the server logs, as JSON lines."""
    return io.StringIO()


@pytest.fixture
def serve(log: io.StringIO) -> Iterator[Serve]:
    """Serve both services with one behavior for all rpcs, and connect to them."""
    boundary = Boundary(make_logger(LogFormat.JSON, log), Access(), Tracing().follow)
    admissions = Admissions(Limits())
    pool = ThreadPoolExecutor(admissions.num_threads)
    server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)])

    def start(behavior: Callable[[Any, grpc.ServicerContext], Any]) -> grpc.Channel:
        server.add_generic_rpc_handlers(
            [service_handler(s, Servicer(behavior), boundary, admissions) for s in SERVICES]
        )
        server.start()
        return channel

    yield start
    channel.close()
    server.stop(None).wait()
    pool.shutdown()


def call(channel: Any, method: MethodDescriptor, request: bytes = b"") -> list[bytes]:
    """Call any rpc with raw bytes; a client stream gets the request as its only message."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        return [channel.stream_unary(path)(iter([request]), timeout=60)]
    if method.server_streaming:
        return list(channel.unary_stream(path)(request, timeout=60))
    return [channel.unary_unary(path)(request, timeout=60)]


def refused(_request: Any, _call: grpc.ServicerContext) -> Any:
    """Fail as the worker does."""
    raise QuarantinedError("the draft is quarantined", subjects=["draft"])


def broken(_request: Any, _call: grpc.ServicerContext) -> Any:
    """Fail as nobody expects."""
    raise KeyError("a secret of the worker")


def test_every_rpc_of_the_contract_is_served() -> None:
    """Both services have a method for each rpc of their descriptors."""
    boundary = Boundary(make_logger(LogFormat.JSON, io.StringIO()), Access(), Tracing().follow)
    for service, servicer in zip(SERVICES, (WeightSyncService, EngineControlService), strict=True):
        service_handler(service, servicer, boundary, Admissions(Limits()))


def test_a_missing_method_stops_the_start() -> None:
    """A service that lacks an rpc of its descriptor can't be registered."""
    boundary = Boundary(make_logger(LogFormat.JSON, io.StringIO()), Access(), Tracing().follow)
    with pytest.raises(AttributeError, match="get_worker"):
        service_handler(SERVICES[0], object(), boundary, Admissions(Limits()))


@pytest.mark.parametrize("method", RPCS, ids=lambda m: m.name)
def test_every_rpc_tells_its_errors(serve: Serve, method: MethodDescriptor) -> None:
    """An error of the worker reaches the caller as the same class, text and facts."""
    with pytest.raises(WeightSyncError) as caught, told():
        call(serve(refused), method)
    error = caught.value
    assert code_of(error) is grpc.StatusCode.FAILED_PRECONDITION
    assert type(error) is QuarantinedError
    assert str(error) == "the draft is quarantined"


@pytest.mark.parametrize("method", RPCS, ids=lambda m: m.name)
def test_every_rpc_hides_faults(serve: Serve, log: io.StringIO, method: MethodDescriptor) -> None:
    """A fault becomes INTERNAL with an id that finds its traceback in the log, and no more."""
    with pytest.raises(WeightSyncError) as caught, told():
        call(serve(broken), method)
    error = caught.value
    assert code_of(error) is grpc.StatusCode.INTERNAL
    assert error.reason is Reason.INTERNAL
    assert "secret" not in str(error)
    (line,) = log.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["correlation_id"] == error.metadata["correlation_id"]
    assert "a secret of the worker" in entry["exception"]


@pytest.mark.parametrize(
    "method", [m for m in RPCS if not m.client_streaming], ids=lambda m: m.name
)
def test_every_rpc_refuses_what_is_no_message(serve: Serve, method: MethodDescriptor) -> None:
    """A request that is no message is the caller's fault, not the worker's."""
    with pytest.raises(WeightSyncError) as caught, told():
        call(serve(lambda _request, _call: None), method, b"\x0a\xff")
    error = caught.value
    assert code_of(error) is grpc.StatusCode.INVALID_ARGUMENT
    assert type(error) is MalformedPayloadError
    assert method.input_type.name in str(error)


@pytest.mark.parametrize("method", RPCS, ids=lambda m: m.name)
def test_every_rpc_answers(serve: Serve, method: MethodDescriptor) -> None:
    """Answers travel as messages or as the raw bytes of one."""
    answer = GetMessageClass(method.output_type)()

    def behavior(request: Any, _call: grpc.ServicerContext) -> Any:
        assert isinstance(request, GetMessageClass(method.input_type)) or method.client_streaming
        return [answer, answer.SerializeToString()] if method.server_streaming else answer

    answers = call(serve(behavior), method)
    assert answers == ([b"", b""] if method.server_streaming else [b""])


def test_waiting_calls_leave_room_for_others(serve: Serve) -> None:
    """When all calls that may wait do wait, the next is refused and status calls answer."""
    methods = {method.name: method for method in RPCS}
    inside = threading.Semaphore(0)
    leave = threading.Event()

    def behavior(request: Any, _call: grpc.ServicerContext) -> Any:
        if isinstance(request, weight_sync_pb2.FinishWeightUpdateRequest):
            inside.release()
            assert leave.wait(60)
        return weight_sync_pb2.GetWorkerResponse()

    channel: Any = serve(behavior)
    finish = channel.unary_unary("/weightsync.v1.WeightSync/FinishWeightUpdate")
    waiting = [finish.future(b"", timeout=60) for _ in range(MAX_WAITING_CALLS)]
    try:
        for _ in waiting:
            assert inside.acquire(timeout=60)
        with pytest.raises(TooManyStreamsError) as caught, told():
            finish(b"", timeout=60)
        assert caught.value.retry_after
        assert call(channel, methods["GetWorker"]) == [b""]
        assert call(channel, methods["GetWeightUpdate"]) == [b""]
    finally:
        leave.set()
    assert [future.result() for future in waiting] == [b""] * MAX_WAITING_CALLS
