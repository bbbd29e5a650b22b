from __future__ import annotations

import io
import json
import socket
import threading
from typing import Any

import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from tests.integration.conftest import Start
from tests.integration.raw import DRAFT, PARTIAL, VERIFIER, RawTrainer, all_bits, connect, noise
from tests.integration.test_streams import HeldStream, piece, wait_for_streams
from weightsync.core.errors import EngineUnavailableError, SessionStateError, WeightSyncError
from weightsync.core.trace import Trace
from weightsync.core.types import Limits, Target
from weightsync.server.server import Server
from weightsync.testing.models import Tiny
from weightsync.v1 import weight_sync_pb2
from weightsync.wire.status import error_of

Models = tuple[Tiny, Tiny]
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENT = Limits(default_lease=3600.0, drain_timeout=3600.0, gate_timeout=3600.0)
"""Nothing ends by itself while a test runs."""


def stop(server: Server, grace: float) -> None:
    """Stop a server, and fail rather than hang if it does not."""
    stopping = threading.Thread(target=server.stop, args=(grace,), daemon=True)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive()


def wait_until_busy(server: Server, session: str) -> None:
    """Wait until a session is being prepared or committed."""
    phase = server.worker._books.updates[session].phase
    for _ in range(6000):
        if phase.locked():
            return
        threading.Event().wait(0.01)
    raise AssertionError


def test_health_flips_before_sessions_end(start: Start, models: Models, log: io.StringIO) -> None:
    """When a session is aborted, probes have long been told; calls are answered until the end."""
    seen: list[Any] = []
    trace = Trace()
    server = start(*models, trace=trace, health_port=0)
    assert server.health_address
    with RawTrainer(server.address) as trainer, connect(server.health_address) as probes:
        health: Any = health_pb2_grpc.HealthStub(probes)

        def hook(name: str, facts: dict[str, object]) -> None:
            if name == "session.ended":
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=60)
                seen.append((answer.status, facts["outcome"], facts["reason"]))
                assert trainer.worker().targets[0].session_id == ""

        session = trainer.start(VERIFIER)
        trainer.push(session, VERIFIER, noise(models[0]))
        before = all_bits(models[0])
        trace.add(hook)
        stop(server, 0.0)
    assert seen == [(NOT_SERVING, "aborted", "the worker is stopping")]
    assert all_bits(models[0]) == before
    events = [json.loads(line)["event"] for line in log.getvalue().splitlines()]
    assert events[-3:] == ["server.stopping", "session.ended", "server.stopped"]


def test_a_stop_comes_to_its_end_whoever_holds_on(start: Start, models: Models) -> None:
    """Open streams, a prepare that waits for them, watchers and mute sockets hold nothing up."""
    server = start(*models, limits=PATIENT, metrics_port=0, health_port=0)
    assert server.metrics_address
    assert server.health_address
    sockets = [
        socket.create_connection((host, int(port)))
        for host, _, port in (
            address.rpartition(":")
            for address in (server.address, server.metrics_address, server.health_address)
        )
    ]
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        held = [HeldStream(trainer, piece(session)), HeldStream(trainer)]
        wait_for_streams(server, 1)
        watch = trainer.stub.WatchWorker(weight_sync_pb2.WatchWorkerRequest(), timeout=600)
        next(watch)
        reading = trainer.stub.ReadWeights(weight_sync_pb2.ReadWeightsRequest(target=VERIFIER))
        request = weight_sync_pb2.PrepareWeightUpdateRequest(session_id=session)
        preparing = trainer.stub.PrepareWeightUpdate.future(request, timeout=600)
        wait_until_busy(server, session)
        stop(server, 0.05)
        assert isinstance(failure(preparing), SessionStateError)
        for stream in held:
            stream.code()
        watch.cancel()
        reading.cancel()
    for mute in sockets:
        mute.close()


def test_a_commit_that_waits_for_its_step_ends_in_time(start: Start, models: Models) -> None:
    """A forward pass that does not end holds a stop for `gate_timeout` at most."""
    limits = Limits(default_lease=3600.0, gate_timeout=0.2)
    server = start(*models, limits=limits)
    engine = server.worker._engine
    before = all_bits(models[1])
    with RawTrainer(server.address) as trainer, engine.gate.step(Target.DRAFT):  # type: ignore[attr-defined]
        session = trainer.start(DRAFT, scope=PARTIAL)
        trainer.push(session, DRAFT, {"fc.bias": torch.ones(4)})
        request = weight_sync_pb2.FinishWeightUpdateRequest(session_id=session)
        finishing = trainer.stub.FinishWeightUpdate.future(request, timeout=600)
        wait_until_busy(server, session)
        stop(server, 0.0)
        assert isinstance(failure(finishing), EngineUnavailableError | SessionStateError)
    assert all_bits(models[1]) == before


def test_a_session_that_finishes_within_the_grace_is_live(start: Start, models: Models) -> None:
    """Writing and finishing go on while it drains, and the stop waits no longer than for that."""
    server = start(*models, limits=PATIENT)
    new = noise(models[0])
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        stopping = threading.Thread(target=server.stop, args=(3600.0,), daemon=True)
        stopping.start()
        health: Any = health_pb2_grpc.HealthStub(trainer.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        while next(watch).status != NOT_SERVING:
            pass
        trainer.push(session, VERIFIER, new)
        assert trainer.finish(session).targets[0].weight_version == "v1"
        watch.cancel()
        stopping.join(60)
    assert not stopping.is_alive()
    assert all_bits(models[0]) == {name: bytes(t.numpy().tobytes()) for name, t in new.items()}


def failure(call: Any) -> WeightSyncError:
    """Wait for the end of a call, and return the error that it ended with."""
    assert call.exception() is not None
    return error_of(rpc_status.from_call(call))
