"""Crowds of clients that connect and then do nothing: who asks how things stand is answered."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import weightsync
from tests.attacks.hostile import RPCS, path_of
from tests.integration.process import run
from tests.integration.raw import VERIFIER, RawTrainer, connect
from weightsync.server.server import Server
from weightsync.testing.models import tiny_pair
from weightsync.v1 import weight_sync_pb2

DEADLINE = 30.0
"""Seconds for a call that changes nothing, on a machine that is busy with other things."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
HALF_A_HEADER = b"\0\0\x40\1\4\0\0\0\1" + b"\x82" * 8


@pytest.fixture
def server() -> Iterator[Server]:
    """A worker of two tiny models."""
    with weightsync.serve(*tiny_pair()) as server:
        yield server


def answers(server: Server) -> None:
    """Ask for worker and health on a new connection, with a deadline."""
    with connect(server.address) as channel:
        get: Any = channel.unary_unary("/weightsync.v1.WeightSync/GetWorker")
        told = weight_sync_pb2.GetWorkerResponse.FromString(get(b"", timeout=DEADLINE))
        assert told.instance_id == server.worker.instance_id
        health: Any = health_pb2_grpc.HealthStub(channel)
        asked = health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)
        assert asked.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "words",
    [b"", PREFACE, PREFACE + SETTINGS, PREFACE + SETTINGS + HALF_A_HEADER, b"GET / HTTP/1.1\r\n"],
    ids=["nothing", "a greeting", "settings", "half a header", "another protocol"],
)
def test_idle_and_half_open_connections_hold_nobody_up(server: Server, words: bytes) -> None:
    """200 connections that say a little and then nothing take no place of others."""
    host, _, port = server.address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(200):
            one = stack.enter_context(socket.create_connection((host, int(port))))
            one.sendall(words)
        answers(server)


@pytest.mark.parametrize("method", RPCS, ids=lambda method: method.name)
def test_calls_that_never_send_their_request_hold_nobody_up(server: Server, method: Any) -> None:
    """Each rpc 150 times, begun and never gone on with: control calls find a thread."""
    over = threading.Event()

    def silent() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with connect(server.address) as channel:
        rpc: Any = channel.stream_stream(path_of(method))
        calls = [rpc(silent()) for _ in range(150)]
        try:
            # Its answer shows that the server has met the calls before it on this connection.
            get: Any = channel.unary_unary("/weightsync.v1.WeightSync/GetWorker")
            assert get(b"", timeout=DEADLINE)
            answers(server)
        finally:
            over.set()
            for call in calls:
                call.cancel()


@pytest.mark.parametrize("name", ["Check", "Watch"])
@pytest.mark.parametrize("port", ["main", "health"])
def test_silent_probes_hold_nobody_up(name: str, port: str) -> None:
    """The health service, beside the others and on its own port, goes on in the same way."""
    with weightsync.serve(*tiny_pair(), health_port=0) as server, ExitStack() as stack:
        address = server.address if port == "main" else str(server.health_address)
        channel = stack.enter_context(connect(address))
        rpc: Any = channel.stream_stream(f"/grpc.health.v1.Health/{name}")
        over = threading.Event()
        stack.callback(over.set)

        def silent() -> Iterator[bytes]:
            over.wait()
            yield from ()

        for _ in range(150):
            stack.callback(rpc(silent()).cancel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        asked = health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)
        assert asked.status == health_pb2.HealthCheckResponse.SERVING
        answers(server)


def test_streams_that_are_never_read_hold_nobody_up(server: Server) -> None:
    """Listings, readings and watches that nobody reads are bounded, and others are answered."""
    with RawTrainer(server.address) as trainer:
        calls: list[Any] = []
        for _ in range(50):
            read = weight_sync_pb2.ReadWeightsRequest(target=VERIFIER)
            calls.append(trainer.stub.ReadWeights(read))
            calls.append(trainer.stub.ListTensors(weight_sync_pb2.ListTensorsRequest()))
            calls.append(trainer.stub.WatchWorker(weight_sync_pb2.WatchWorkerRequest()))
        answers(server)
        for call in calls:
            call.cancel()


@pytest.mark.slow
def test_thousands_of_cancelled_streams_leave_nothing() -> None:
    """After 5,000 streams that were cut off, memory, threads and descriptors are as before."""
    told = run(
        """
import os
import torch
import weightsync
from tests.integration.raw import RawTrainer, VERIFIER, chunk
from weightsync.core.malloc import tune_malloc

tune_malloc()  # as `weightsync serve` does
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)

def cancel(trainer, session, count):
    message = chunk(session, VERIFIER, {"bias": torch.ones(8)})
    for _ in range(count):
        met = threading.Event()
        def messages():
            yield message
            met.wait(60)
        call = trainer.stub.UpdateWeights.future(messages())
        call.cancel()
        met.set()

def settled(server):
    deadline = threading.Event()
    while server.worker.open_streams:
        deadline.wait(0.01)
    return rss(), threading.active_count(), len(os.listdir("/proc/self/fd"))

with weightsync.serve(model) as server, RawTrainer(server.address) as trainer:
    session = trainer.start(VERIFIER, lease={"seconds": 3000})
    cancel(trainer, session, 1000)
    first = settled(server)
    cancel(trainer, session, 2000)
    half = settled(server)
    cancel(trainer, session, 2000)
    last = settled(server)
tell(rise=[half[0] - first[0], last[0] - half[0]], threads=last[1] - half[1], fds=last[2] - half[2])
"""
    )
    assert max(told["rise"]) < 16 << 20
    assert told["threads"] < 32  # The pool has a limit, and grows to it when it is first needed.
    assert told["fds"] <= 2
