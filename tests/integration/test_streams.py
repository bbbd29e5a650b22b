from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch

from tests.integration.conftest import Start
from tests.integration.raw import PARTIAL, VERIFIER, RawTrainer, all_bits, bits, chunk, noise, told
from weightsync.core.errors import TooManyStreamsError, UnknownTensorError
from weightsync.core.types import Limits
from weightsync.server.server import Server
from weightsync.testing.models import Tiny
from weightsync.v1 import types_pb2, weight_sync_pb2

Models = tuple[Tiny, Tiny]
Message = weight_sync_pb2.UpdateWeightsRequest

MIB = 1 << 20


class HeldStream:
    """A stream that stays open, without another message, until it is let go."""

    def __init__(self, trainer: RawTrainer, *messages: Message) -> None:
        self._go = threading.Event()
        self._messages = messages
        self.call = trainer.stub.UpdateWeights.future(self._produce(), timeout=60)

    def _produce(self) -> Iterator[Message]:
        yield from self._messages
        self._go.wait(60)

    def end(self) -> weight_sync_pb2.UpdateWeightsResponse:
        """Half-close the stream and return the worker's answer."""
        self._go.set()
        return self.call.result()

    def code(self) -> grpc.StatusCode:
        """Wait for the end of the call, which the worker brings about, and return its code."""
        try:
            self.call.exception()
        finally:
            self._go.set()
        return self.call.code()


def wait_for_streams(server: Server, count: int) -> None:
    """Wait until the worker has exactly so many open streams."""
    deadline = time.monotonic() + 60
    while server.worker.open_streams != count:
        assert time.monotonic() < deadline, server.worker.open_streams
        threading.Event().wait(0.01)


def piece(session: str) -> Message:
    """Return a right chunk."""
    return chunk(session, VERIFIER, {"fc.bias": torch.ones(4)})


def test_control_answers_while_all_streams_are_busy(start: Start, models: Models) -> None:
    """With every stream, reader and watcher taken, status, start, abort and health answer (B81)."""
    limits = Limits(max_streams=3, max_watchers=2)
    server = start(*models, limits=limits)
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        held = [HeldStream(trainer, piece(session)) for _ in range(3)]
        watch = weight_sync_pb2.WatchWorkerRequest()
        watchers = [trainer.stub.WatchWorker(watch, timeout=60) for _ in range(2)]
        for watcher in watchers:
            next(watcher)
        wait_for_streams(server, 3)
        with pytest.raises(TooManyStreamsError) as caught, told():
            trainer.send([piece(session)])
        assert caught.value.retry_after
        with pytest.raises(TooManyStreamsError), told():
            next(trainer.stub.WatchWorker(watch, timeout=60))
        assert trainer.session(session).session.received_bytes == 3 * 16
        assert len(list(trainer.stub.ListTensors(weight_sync_pb2.ListTensorsRequest()))) == 1
        other = trainer.start(types_pb2.TARGET_DRAFT)
        assert trainer.abort(other).state == types_pb2.SESSION_STATE_ABORTED
        assert trainer.worker().targets
        assert {h.end().received_chunks for h in held} == {1}
        for watcher in watchers:
            watcher.cancel()


def test_many_refused_streams_take_no_threads(start: Start, models: Models) -> None:
    """Streams beyond the limit are refused at once, however many come, and leave nothing."""
    server = start(*models, limits=Limits(max_streams=1))
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        held = HeldStream(trainer, piece(session))
        wait_for_streams(server, 1)
        for _ in range(200):
            with pytest.raises(TooManyStreamsError), told():
                trainer.send([piece(session)])
        held.end()
        wait_for_streams(server, 0)
        assert trainer.send([piece(session)]).received_chunks == 1


def test_a_vanished_client_frees_its_streams(start: Start, models: Models) -> None:
    """A client that is gone in the middle of its streams holds no thread (B81, B65)."""
    server = start(*models, limits=Limits(max_streams=2))
    with RawTrainer(server.address) as alive:
        session = alive.start(VERIFIER)
        for _ in range(3):
            dead = RawTrainer(server.address)
            streams = [HeldStream(dead, piece(session)) for _ in range(2)]
            wait_for_streams(server, 2)
            dead.channel.close()
            wait_for_streams(server, 0)
            assert {stream.code() for stream in streams} == {grpc.StatusCode.CANCELLED}
        alive.push(session, VERIFIER, noise(models[0]) | {"fc.bias": torch.ones(4)})
        alive.finish(session)
    assert bits(models[0].fc.bias) == bits(torch.ones(4))


def test_a_vanished_watcher_frees_its_place(start: Start, models: Models) -> None:
    """A watcher that is gone makes room for the next one."""
    server = start(*models, limits=Limits(max_watchers=1))
    with RawTrainer(server.address) as trainer:
        for _ in range(3):
            watch_when_free(trainer).cancel()


def watch_when_free(trainer: RawTrainer) -> Any:
    """Return a watcher that is connected, as soon as the worker has a place for it."""
    deadline = time.monotonic() + 60
    while True:
        events = trainer.stub.WatchWorker(weight_sync_pb2.WatchWorkerRequest(), timeout=60)
        try:
            with told():
                next(events)
        except TooManyStreamsError:
            assert time.monotonic() < deadline
        else:
            return events


def test_a_silent_stream_ends_with_its_session(start: Start, models: Models) -> None:
    """When a session ends, a stream of it that sends nothing is ended too."""
    server = start(*models)
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        held = HeldStream(trainer, piece(session))
        wait_for_streams(server, 1)
        trainer.abort(session)
        assert held.code() is grpc.StatusCode.CANCELLED
        wait_for_streams(server, 0)


def test_a_silent_stream_ends_with_the_lease(start: Start, models: Models) -> None:
    """Dead streams are free when the lease is over, and so is the target (B81)."""
    before = all_bits(models[0])
    server = start(*models, limits=Limits(max_streams=2))
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER, lease={"nanos": 200_000_000})
        held = [HeldStream(trainer, piece(session)) for _ in range(2)]
        assert {stream.code() for stream in held} == {grpc.StatusCode.CANCELLED}
        wait_for_streams(server, 0)
        assert trainer.session(session).session.state == types_pb2.SESSION_STATE_EXPIRED
        trainer.start(VERIFIER)
    assert all_bits(models[0]) == before


def test_a_stream_that_never_speaks_is_ended(start: Start, models: Models) -> None:
    """A stream without a first message can't take a place for ever."""
    server = start(*models, limits=Limits(max_streams=1, default_lease=0.2))
    with RawTrainer(server.address) as trainer:
        assert HeldStream(trainer).code() is grpc.StatusCode.CANCELLED
        session = trainer.start(VERIFIER, lease={"seconds": 60})
        assert trainer.send([piece(session)]).received_chunks == 1


def test_a_rejected_stream_does_not_hang(start: Start, models: Models) -> None:
    """A bad first chunk is told at once, though the client has far more to send (B85)."""
    server = start(*models)
    sent = 0

    def endless(session: str) -> Iterator[Message]:
        nonlocal sent
        big = chunk(session, VERIFIER, {"nobody": torch.zeros(3 * MIB, dtype=torch.uint8)})
        while True:
            sent += 1
            yield big

    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        with pytest.raises(UnknownTensorError), told():
            trainer.send(endless(session))
        assert sent < 100
        trainer.abort(session)
        server.stop(0.0)
        assert server.wait(60)


def test_a_message_over_the_limit_is_refused(start: Start) -> None:
    """The largest message fits, one byte more is RESOURCE_EXHAUSTED, the session goes on (B76)."""
    model = torch.nn.Linear(1024, 1024, bias=False)
    limits = Limits(max_message_bytes=2 * MIB)
    server = start(model, limits=limits)
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        weight = torch.ones(1024, 1024)

        def message(size: int) -> Message:
            part = types_pb2.Segment(
                target=VERIFIER, name="weight", dtype=types_pb2.DATA_TYPE_FLOAT32,
                shape=weight.shape, byte_length=size,
            )  # fmt: skip
            return chunk(session, VERIFIER, {}, segments=[part], payload=bits(weight)[:size])

        near = limits.max_message_bytes - 256
        size = near + limits.max_message_bytes - message(near).ByteSize()
        assert message(size).ByteSize() == limits.max_message_bytes
        assert trainer.send([message(size)]).received_bytes == size
        with pytest.raises(grpc.RpcError) as caught:
            trainer.send([message(size + 1)])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        state = trainer.session(session).session
        assert (state.state, state.received_bytes) == (types_pb2.SESSION_STATE_OPEN, size)


def test_a_slow_worker_slows_its_sender(start: Start, models: Models) -> None:
    """Messages that the worker has not asked for stay with the sender (B79)."""
    server = start(*models)
    release = threading.Event()
    taken = threading.Event()

    def hold(name: str, _facts: dict[str, object]) -> None:
        if name == "chunk.started":
            taken.set()
            assert release.wait(60)

    server.worker.trace.add(hold)
    sent = 0

    def messages(session: str) -> Iterator[Message]:
        nonlocal sent
        extra = torch.zeros(3 * MIB, dtype=torch.uint8)
        for _ in range(100):
            sent += 1
            yield chunk(session, VERIFIER, {"extra": extra})

    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER, scope=PARTIAL, ignore_names=["extra"])
        call = trainer.stub.UpdateWeights.future(messages(session), timeout=60)
        assert taken.wait(60)
        # Many round trips on the same connection: the sender had its chance to run ahead.
        for _ in range(200):
            trainer.worker()
        assert sent < 20
        release.set()
        assert call.result().received_chunks == 100


def test_pinging_clients_are_not_cut_off(start: Start, models: Models) -> None:
    """A client that pings every second while no data flows keeps its stream (B78)."""
    server = start(*models)
    with RawTrainer(
        server.address, keepalive_time_ms=1000, **{"http2.max_pings_without_data": 0}
    ) as trainer:
        session = trainer.start(VERIFIER)
        held = HeldStream(trainer, piece(session))
        # By default a server says GOAWAY at the third ping.
        with pytest.raises(grpc.FutureTimeoutError):
            held.call.result(timeout=6)
        assert held.end().received_chunks == 1


def test_a_deadline_leaves_the_session_open(start: Start, models: Models) -> None:
    """A stream that runs out of time is over; what it brought stays in the session (B86)."""
    server = start(*models)
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        endless = HeldStream(trainer, piece(session))
        wait_for_streams(server, 1)
        with pytest.raises(grpc.RpcError) as caught:
            trainer.stub.UpdateWeights(iter([piece(session)] * 100_000), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        endless.end()
        wait_for_streams(server, 0)
        assert trainer.session(session).session.state == types_pb2.SESSION_STATE_OPEN
        assert "fc.bias" not in {m.name for m in trainer.session(session).missing}


def test_finish_respects_the_callers_deadline(start: Start, models: Models) -> None:
    """Finish waits for open streams no longer than its caller does, and changes nothing."""
    before = all_bits(models[0])
    server = start(*models)
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        held = HeldStream(trainer, piece(session))
        wait_for_streams(server, 1)
        request = weight_sync_pb2.FinishWeightUpdateRequest(session_id=session)
        with pytest.raises(grpc.RpcError) as caught:
            trainer.stub.FinishWeightUpdate(request, timeout=0.3)
        assert caught.value.code() in (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        held.end()
        assert trainer.session(session).session.state == types_pb2.SESSION_STATE_OPEN
    assert all_bits(models[0]) == before
