"""One worker: each call of the contract, typed, with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from weightsync.core.trace import carried
from weightsync.core.types import Target, Transport, UpdateRequest
from weightsync.core.views import (
    CommitReport,
    Event,
    MissingTensor,
    PrepareReport,
    SessionInfo,
    StreamReport,
    TensorDigest,
    TensorInfo,
    WorkerInfo,
)
from weightsync.v1 import weight_sync_pb2 as pb
from weightsync.v1.engine_control_pb2_grpc import EngineControlStub
from weightsync.v1.weight_sync_pb2_grpc import WeightSyncStub
from weightsync.wire import answers
from weightsync.wire.chunk import Chunk, parse_read_chunk
from weightsync.wire.convert import targets_to_proto
from weightsync.wire.requests import update_request_to_proto
from weightsync.wire.workers import worker_from_proto
from weightsync_client.arenas import ArenaSocket, MappedArena
from weightsync_client.channel import open_channel
from weightsync_client.control import Control
from weightsync_client.credentials import Credentials
from weightsync_client.errors import ConnectionLostError, from_rpc
from weightsync_client.forks import process
from weightsync_client.idle import Messages, iterate

if TYPE_CHECKING:
    from typing_extensions import Self

SERVICE = "weightsync.v1.WeightSync"
T = TypeVar("T")
R = TypeVar("R")
Unary: TypeAlias = "grpc.UnaryUnaryMultiCallable[R, T]"


class StreamCall(Protocol):
    """A running UpdateWeights call, as gRPC's `future` gives it."""

    def result(self, timeout: float | None = None) -> StreamReport:
        """Wait for the answer."""

    def cancel(self) -> bool:
        """End the call."""

    def add_done_callback(self, callback: Callable[[object], None], /) -> None:
        """Call a function when the call has ended."""


class Worker:
    """A connection to one worker.

    Every call raises `WeightSyncError` classes only: what the worker said, `ConnectionLostError`
    or `DeadlineError`; in a forked child, `UnsupportedError`. Safe to use from several threads.
    """

    def __init__(
        self,
        address: str,
        *,
        instance_id: str | None = None,
        credentials: Credentials | None = None,
        timeout: float = 30.0,
        commit_timeout: float = 600.0,
    ) -> None:
        """Name a worker; the connection is made at the first call.

        Args:
            address: `HOST:PORT` or `unix:///PATH`.
            instance_id: The process that must answer there; None: any.
            credentials: Certificates and token; None: plain text, and no token.
            timeout: Deadline of unary calls, and longest silence of a stream, in seconds.
            commit_timeout: Deadline of prepare and finish, in seconds.
        """
        self.address = address
        self.timeout = timeout
        self._instance_id = instance_id
        self._commit_timeout = commit_timeout
        self._credentials = credentials
        self._first_channel = open_channel(address, credentials)
        self._rpcs = WeightSyncStub(self._first_channel)
        self._lanes: list[grpc.Channel] = []
        self._lock = threading.Lock()
        self._arenas: ArenaSocket | None = None

    def __repr__(self) -> str:
        return f"Worker({self.address!r})"

    @property
    def control(self) -> Control:
        """Control of the engine: hold it, put it to sleep, wake it up."""
        return Control(
            EngineControlStub(self._channel), partial(self._call, timeout=self._commit_timeout)
        )

    def info(self, *, wait: float | None = None) -> WorkerInfo:
        """Return who the worker is and what its targets hold.

        Args:
            wait: Seconds to wait for a worker that does not listen yet; None: fail at once.
        """
        timeout = self.timeout if wait is None else wait
        call = self._stub.GetWorker
        message = self._call(call, pb.GetWorkerRequest(), timeout, wait=wait is not None)
        self._check_instance(message.instance_id)
        return worker_from_proto(message)

    def tensors(self, targets: Iterable[Target] = ()) -> Iterator[TensorInfo]:
        """Yield the tensors that the worker needs; of all its targets if none is named."""
        request = pb.ListTensorsRequest(targets=targets_to_proto(targets))
        for batch in self._each(self._stub.ListTensors(request), self.timeout):
            yield from map(answers.tensor_info_from_proto, batch.tensors)

    def start(self, request: UpdateRequest) -> SessionInfo:
        """Open a session. Idempotent by the request's id."""
        if Transport.SHARED_MEMORY in request.transports:
            request = replace(request, shared_memory_id=self._shared_memory_id())
        message = self._call(self._stub.StartWeightUpdate, update_request_to_proto(request))
        self._check_instance(message.instance_id)
        return answers.session_from_proto(message.session)

    def arena(self, session_id: str) -> MappedArena | None:
        """Map the arena of a session; None if its bytes come another way, or it has ended."""
        if self.session(session_id).transport is not Transport.SHARED_MEMORY:
            return None
        client = self._shared_memory_id()
        if not client or self._arenas is None:
            return None  # Joined from another host.
        request = pb.ListPlacementsRequest(session_id=session_id, shared_memory_id=client)
        placements = [
            answers.placement_from_proto(tensor)
            for batch in self._each(self._stub.ListPlacements(request), self.timeout)
            for tensor in batch.tensors
        ]
        return MappedArena(self._arenas.map(session_id), placements)

    def session(self, session_id: str, *, wait: float | None = None) -> SessionInfo:
        """Return where a session stands; `wait` as for `info`."""
        return answers.session_from_proto(self._page(session_id, "", 1, wait).session)

    def missing(self, session_id: str) -> Iterator[MissingTensor]:
        """Yield what a session still misses."""
        token = ""
        while True:
            page = self._page(session_id, token, 0, None)
            yield from map(answers.missing_from_proto, page.missing)
            if not page.next_page_token:
                return
            if page.next_page_token == token:
                raise ConnectionLostError(
                    f"{self.address}: a page of what is missing leads to itself",
                    worker=self.address,
                )
            token = page.next_page_token

    def prepare(self, session_id: str) -> PrepareReport:
        """Check that everything of a session is there. Idempotent."""
        request = pb.PrepareWeightUpdateRequest(session_id=session_id)
        call = self._stub.PrepareWeightUpdate
        return answers.prepare_from_proto(self._call(call, request, self._commit_timeout))

    def finish(self, session_id: str) -> CommitReport:
        """Make a session's weights live. Idempotent."""
        request = pb.FinishWeightUpdateRequest(session_id=session_id)
        call = self._stub.FinishWeightUpdate
        return answers.commit_from_proto(self._call(call, request, self._commit_timeout))

    def abort(self, session_id: str, cause: str = "") -> SessionInfo:
        """Drop a session. Idempotent."""
        request = pb.AbortWeightUpdateRequest(session_id=session_id, cause=cause)
        message = self._call(self._stub.AbortWeightUpdate, request)
        return answers.session_from_proto(message.session)

    def digests(
        self, targets: Iterable[Target] = (), names: Sequence[str] = ()
    ) -> Iterator[TensorDigest]:
        """Yield digests of live tensors; with names, one target must be given."""
        request = pb.VerifyWeightsRequest(targets=targets_to_proto(targets), names=names)
        for batch in self._each(self._stub.VerifyWeights(request), self.timeout):
            yield from map(answers.digest_from_proto, batch.digests)

    def read(self, target: Target, names: Sequence[str] = ()) -> Iterator[Chunk]:
        """Yield live tensors as chunks, each compared with its checksum; no names: all of them."""
        (wanted,) = targets_to_proto([target])
        call: grpc.UnaryStreamMultiCallable[pb.ReadWeightsRequest, Chunk]
        call = self._channel.unary_stream(
            f"/{SERVICE}/ReadWeights",
            request_serializer=pb.ReadWeightsRequest.SerializeToString,
            response_deserializer=parse_read_chunk,
        )
        request = pb.ReadWeightsRequest(target=wanted, names=names)
        for chunk in self._each(call(request), self.timeout):
            chunk.check()
            yield chunk

    def watch(self, after_sequence: int = 0) -> Iterator[Event]:
        """Yield events as they happen, without end; close the iterator to stop."""
        call = self._stub.WatchWorker(pb.WatchWorkerRequest(after_sequence=after_sequence))
        for message in self._each(call, idle=None):
            yield answers.event_from_proto(message)

    def serving(self) -> bool:
        """Tell whether the worker takes sessions, as its health service says."""
        check_health: Unary[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse] = (
            self._channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
        )
        answer = self._call(check_health, health_pb2.HealthCheckRequest(service=SERVICE))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def send(self, messages: Iterator[bytes], lane: int = 0) -> StreamCall:
        """Begin an UpdateWeights stream of serialized messages.

        Args:
            messages: Read by a thread of its own, as fast as the worker takes them.
            lane: Which of several connections to use; the first is the one of all other calls.
        """
        call: grpc.StreamUnaryMultiCallable[bytes, StreamReport] = self._lane(lane).stream_unary(
            f"/{SERVICE}/UpdateWeights",
            request_serializer=None,  # They are bytes already.
            response_deserializer=_stream_report,
        )
        # No deadline over all: who sends watches each message.
        return call.future(messages, metadata=carried.get())

    def close(self) -> None:
        """Close the connections."""
        if process.is_crippled:
            return  # They are the parent's.
        with self._lock:
            for channel in (self._channel, *self._lanes):
                channel.close()
            self._lanes.clear()
            if self._arenas is not None:
                self._arenas.close()
                self._arenas = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _channel(self) -> grpc.Channel:
        process.check()
        return self._first_channel

    @property
    def _stub(self) -> WeightSyncStub:
        process.check()
        return self._rpcs

    def _page(
        self, session_id: str, token: str, size: int, wait: float | None
    ) -> pb.GetWeightUpdateResponse:
        request = pb.GetWeightUpdateRequest(session_id=session_id, page_token=token, page_size=size)
        timeout = self.timeout if wait is None else wait
        return self._call(self._stub.GetWeightUpdate, request, timeout, wait=wait is not None)

    def _shared_memory_id(self) -> str:
        """Return what the worker's socket calls this client; empty: it is not on this host."""
        process.check()  # Who holds the lock may be left behind in the parent.
        with self._lock:
            if self._arenas is not None and not self._arenas.alive:
                self._arenas.close()
                self._arenas = None
            if self._arenas is None:
                name = self.info().shared_memory_socket
                try:
                    self._arenas = ArenaSocket(name, self.timeout)
                except OSError:
                    return ""
            return self._arenas.client_id

    def _lane(self, lane: int) -> grpc.Channel:
        process.check()
        with self._lock:
            while lane > len(self._lanes):
                self._lanes.append(open_channel(self.address, self._credentials))
            return self._lanes[lane - 1] if lane else self._channel

    def _check_instance(self, instance_id: str) -> None:
        if self._instance_id not in (None, instance_id):
            raise ConnectionLostError(
                f"{self.address}: process {instance_id} answers instead of {self._instance_id}: "
                f"the worker was restarted, or another one took its address",
                worker=self.address,
            )

    def _each(self, call: Messages[T], idle: float | None) -> Iterator[T]:
        return iterate(call, self.address, idle)

    def _call(
        self,
        call: Unary[R, T],
        request: R,
        timeout: float | None = None,
        *,
        wait: bool = False,
    ) -> T:
        try:
            return call(
                request,
                timeout=timeout or self.timeout,
                metadata=carried.get(),
                wait_for_ready=wait,
            )
        except grpc.RpcError as error:
            raise from_rpc(error, self.address) from None


def _stream_report(data: bytes) -> StreamReport:
    return answers.stream_report_from_proto(pb.UpdateWeightsResponse.FromString(data))


def connect(
    address: str,
    *,
    instance_id: str | None = None,
    credentials: Credentials | None = None,
    timeout: float = 30.0,
) -> Worker:
    """Connect to a worker and check that it answers.

    Args:
        address: `HOST:PORT` or `unix:///PATH`.
        instance_id: The process that must answer there; None: any.
        credentials: Certificates and token; None: plain text, and no token.
        timeout: Deadline of unary calls, and longest silence of a stream, in seconds.

    Raises:
        ConnectionLostError: nothing answers there, or another process.
        DeadlineError: no answer in time.
    """
    worker = Worker(address, instance_id=instance_id, credentials=credentials, timeout=timeout)
    try:
        worker.info()
    except BaseException:
        worker.close()
        raise
    return worker
