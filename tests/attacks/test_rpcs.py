"""Every rpc, with anything in place of its request."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

import weightsync
from tests.attacks.hostile import RPCS, path_of, raw
from tests.integration.raw import PARTIAL, VERIFIER, RawTrainer, chunk, noise
from weightsync.core.types import Limits
from weightsync.server.logs import LogFormat, make_logger
from weightsync.server.server import Server
from weightsync.testing.models import tiny_pair
from weightsync.v1 import engine_control_pb2, weight_sync_pb2

Code = grpc.StatusCode

NEVER = {Code.INTERNAL, Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.DATA_LOSS}
"""What no input may lead to: a fault of ours, or no answer."""

LIMITS = Limits(max_arena_bytes=1 << 20, gate_timeout=1.0, drain_timeout=0.1, max_sessions=8)


class Target:
    """A worker under attack, with what it logs."""

    def __init__(self) -> None:
        self.log = io.StringIO()
        logger = make_logger(LogFormat.JSON, self.log, logging.INFO)
        self.models = tiny_pair()
        self.server: Server = weightsync.serve(*self.models, log=logger, limits=LIMITS)
        self.trainer = RawTrainer(self.server.address)

    def open_session(self) -> str:
        """Return a session that is open, awake and running."""
        worker, control = self.trainer.worker(), self.trainer.control
        control.WakeUp(engine_control_pb2.WakeUpRequest(), timeout=60)
        control.ResumeGeneration(engine_control_pb2.ResumeGenerationRequest(), timeout=60)
        for status in worker.targets:
            if status.session_id:
                self.trainer.abort(status.session_id)
        return self.trainer.start(VERIFIER, scope=PARTIAL)

    def call(self, method: MethodDescriptor, requests: list[bytes]) -> Code:
        """Make a call, read what it answers, and return how it ended."""
        kind = ("stream" if method.client_streaming else "unary") + (
            "_stream" if method.server_streaming else "_unary"
        )
        rpc = getattr(self.trainer.channel, kind)(path_of(method))
        request = iter(requests) if method.client_streaming else requests[0]
        try:
            if not method.server_streaming:
                rpc(request, timeout=60)
            elif method.name == "WatchWorker":
                events = rpc(request, timeout=60)  # Without an end.
                next(events)
                events.cancel()
            else:
                list(rpc(request, timeout=60))
        except grpc.RpcError as error:
            return error.code()
        return Code.OK


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """One worker for all: what one input leaves behind, the next one meets."""
    target = Target()
    with target.server, target.trainer:
        yield target


@pytest.mark.parametrize("method", RPCS, ids=lambda method: method.name)
@settings(max_examples=80)
@given(data=st.data())
def test_any_input_gets_a_proper_status(
    target: Target, method: MethodDescriptor, data: st.DataObject
) -> None:
    """Whatever is sent, the answer is a result or an error of the contract, and work goes on."""
    session = target.open_session()
    one = raw(GetMessageClass(method.input_type), session)
    requests = data.draw(st.lists(one, min_size=1, max_size=3 if method.client_streaming else 1))
    assert target.call(method, requests) not in NEVER
    assert "call.failed" not in target.log.getvalue()
    assert target.server.worker.staging_bytes <= LIMITS.max_arena_bytes


def test_after_all_that_the_worker_takes_an_update(target: Target) -> None:
    """A worker that was attacked is healed by one whole update, as ever."""
    target.trainer.abort(target.open_session())
    new = noise(target.models[0])
    session = target.trainer.start(VERIFIER, version="clean")
    target.trainer.send(chunk(session, VERIFIER, {name: new[name]}) for name in new)
    request = weight_sync_pb2.FinishWeightUpdateRequest(session_id=session)
    answer = target.trainer.stub.FinishWeightUpdate(request, timeout=60)
    assert answer.targets[0].weight_version == "clean"
