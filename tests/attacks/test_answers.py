"""A worker that answers anything: its client raises errors of the contract, and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st
from weightsync_client import Fleet, SendOptions, Worker

from tests.attacks.hostile import RPCS, path_of, raw
from weightsync.core.errors import WeightSyncError
from weightsync.core.types import Target
from weightsync.v1 import types_pb2
from weightsync.v1 import weight_sync_pb2 as pb

MAX_CALLS = 200
"""More calls than that for one update: a client that can be kept busy for ever."""


class Liar:
    """A server that gives to each rpc whatever it was told to."""

    def __init__(self) -> None:
        self.answers: dict[str, list[bytes]] = {}
        self.calls = 0
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        """Stop."""
        self._server.stop(None).wait()


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, liar: Liar) -> None:
        self._liar = liar
        self._methods = {path_of(method): method for method in RPCS}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = self._methods.get(details.method)
        if method is None:
            return None
        self._liar.calls += 1
        answers = self._liar.answers.get(method.name, [b""])
        if self._liar.calls > MAX_CALLS:
            return None

        def one(request: Any, _call: object) -> bytes:
            if method.client_streaming:
                list(request)
            return answers[0] if answers else b""

        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(one)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(lambda _request, _call: iter(answers))
        return grpc.unary_unary_rpc_method_handler(one)


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    """One liar for all tests of this file."""
    liar = Liar()
    yield liar
    liar.stop()


CALLS: dict[str, Callable[[Worker], object]] = {
    "GetWorker": Worker.info,
    "ListTensors": lambda worker: list(worker.tensors()),
    "GetWeightUpdate": lambda worker: worker.session("s"),
    "PrepareWeightUpdate": lambda worker: worker.prepare("s"),
    "FinishWeightUpdate": lambda worker: worker.finish("s"),
    "AbortWeightUpdate": lambda worker: worker.abort("s"),
    "VerifyWeights": lambda worker: list(worker.digests()),
    "ReadWeights": lambda worker: list(worker.read(Target.VERIFIER)),
    "WatchWorker": lambda worker: list(worker.watch()),
    "UpdateWeights": lambda worker: worker.send(iter([b""])).result(60),
    "Sleep": lambda worker: worker.control.sleep(1),
    "WakeUp": lambda worker: worker.control.wake_up(),
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_answer_is_taken_or_refused(liar: Liar, name: str, data: st.DataObject) -> None:
    """What is no answer of the contract is an error of this project, never another one."""
    (method,) = (rpc for rpc in RPCS if rpc.name == name)
    one = raw(GetMessageClass(method.output_type), "s")
    liar.calls = 0
    liar.answers = {name: data.draw(st.lists(one, min_size=1, max_size=3))}
    with Worker(liar.address, timeout=30) as worker:
        try:
            CALLS[name](worker)
        except WeightSyncError:
            pass
        except grpc.RpcError:
            assert name == "UpdateWeights"  # `Stream` is what turns it into ours.


GOOD_TENSOR = types_pb2.TensorInfo(
    target=types_pb2.TARGET_VERIFIER,
    name="fc.weight",
    dtype=types_pb2.DATA_TYPE_FLOAT32,
    shape=[4, 4],
    regions=[types_pb2.Region(offsets=[0, 0], sizes=[4, 4])],
)


def session() -> types_pb2.Session:
    """Return an open session as a worker tells it."""
    return types_pb2.Session(
        session_id="s",
        state=types_pb2.SESSION_STATE_OPEN,
        targets=[types_pb2.TARGET_VERIFIER],
        scope=types_pb2.SCOPE_FULL,
        mode=types_pb2.UPDATE_MODE_STAGED,
        transport=types_pb2.TRANSPORT_INLINE,
    )


def update(liar: Liar, **answers: Message | list[bytes]) -> None:
    """Push one tensor to a worker that tells the truth but for some answers."""
    limits = types_pb2.Limits(max_message_bytes=1 << 20, max_segments=100)
    told: dict[str, Message | list[bytes]] = {
        "GetWorker": pb.GetWorkerResponse(instance_id="i", limits=limits),
        "ListTensors": pb.ListTensorsResponse(tensors=[GOOD_TENSOR]),
        "StartWeightUpdate": pb.StartWeightUpdateResponse(session=session()),
        "GetWeightUpdate": pb.GetWeightUpdateResponse(session=session()),
        "AbortWeightUpdate": pb.AbortWeightUpdateResponse(session=session()),
        "PrepareWeightUpdate": pb.PrepareWeightUpdateResponse(session=session()),
        **answers,
    }
    liar.answers = {
        name: answer if isinstance(answer, list) else [answer.SerializeToString()]
        for name, answer in told.items()
    }
    liar.calls = 0
    with (
        Fleet([Worker(liar.address, timeout=30)]) as fleet,
        fleet.update(version="v1", options=SendOptions(patience=1.0)) as going,
    ):
        going.push({"fc.weight": np.ones((4, 4), np.float32)})


@pytest.mark.parametrize("name", ["GetWorker", "ListTensors", "StartWeightUpdate"])
@settings(max_examples=60)
@given(data=st.data())
def test_an_update_over_any_answer_ends(liar: Liar, name: str, data: st.DataObject) -> None:
    """A whole update ends in an error of this project, whatever one of its answers is."""
    (method,) = (rpc for rpc in RPCS if rpc.name == name)
    one = raw(GetMessageClass(method.output_type), "s")
    with pytest.raises(WeightSyncError):
        update(liar, **{name: data.draw(st.lists(one, min_size=1, max_size=2))})
    assert liar.calls <= MAX_CALLS


BAD_TENSORS: dict[str, dict[str, Any]] = {
    "region of other dimensions": {"regions": [{"offsets": [0], "sizes": [4]}]},
    "offsets without sizes": {"regions": [{"offsets": [0, 0], "sizes": []}]},
    "region outside": {"regions": [{"offsets": [2, 0], "sizes": [4, 4]}]},
    "region past 64 bits": {"regions": [{"offsets": [2**64 - 1, 0], "sizes": [2**64 - 1, 4]}]},
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_tensor_that_cannot_be_is_refused(liar: Liar, case: str) -> None:
    """A worker that lists a region outside its tensor is not sent anything."""
    tensor = types_pb2.TensorInfo()
    tensor.CopyFrom(GOOD_TENSOR)
    del tensor.regions[:]
    tensor.MergeFrom(types_pb2.TensorInfo(**BAD_TENSORS[case]))
    with pytest.raises(WeightSyncError, match=r"fc\.weight"):
        update(liar, ListTensors=pb.ListTensorsResponse(tensors=[tensor]))


def test_a_page_that_leads_to_itself_is_refused(liar: Liar) -> None:
    """A worker that repeats a page token can't keep its client busy for ever."""
    page = pb.GetWeightUpdateResponse(session=session(), next_page_token="7")  # noqa: S106 - of a page
    liar.answers = {"GetWeightUpdate": [page.SerializeToString()]}
    liar.calls = 0
    with Worker(liar.address) as worker, pytest.raises(WeightSyncError, match="page"):
        list(worker.missing("s"))
    assert liar.calls <= MAX_CALLS
