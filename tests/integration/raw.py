"""A trainer on bare stubs, as a person with nothing but the contract would write it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast, final
from urllib.parse import quote

import grpc
import torch
from grpc_status import rpc_status
from xxhash import xxh3_64_intdigest

from weightsync.apply.dtypes import from_torch
from weightsync.core.errors import WeightSyncError
from weightsync.v1 import engine_control_pb2_grpc, types_pb2, weight_sync_pb2, weight_sync_pb2_grpc
from weightsync.wire.status import error_of

VERIFIER = types_pb2.TARGET_VERIFIER
DRAFT = types_pb2.TARGET_DRAFT
FULL = types_pb2.SCOPE_FULL
PARTIAL = types_pb2.SCOPE_PARTIAL

Tensors = Mapping[str, torch.Tensor]


def connect(address: str, **options: int) -> grpc.Channel:
    """Return a channel of its own connection, which ignores the environment's proxies."""
    if address.startswith("unix:"):
        address = "unix:" + quote(address.removeprefix("unix://"))
    pairs = {"grpc.enable_http_proxy": 0, "grpc.use_local_subchannel_pool": 1}
    pairs |= {f"grpc.{name}": value for name, value in options.items()}
    return grpc.insecure_channel(address, options=list(pairs.items()))


@final
class RawTrainer:
    """Stubs of both services, and the few steps of a session."""

    def __init__(self, address: str, **options: int) -> None:
        self.channel = connect(address, **options)
        self.stub = weight_sync_pb2_grpc.WeightSyncStub(self.channel)
        self.control = engine_control_pb2_grpc.EngineControlStub(self.channel)

    def __enter__(self) -> RawTrainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.channel.close()

    def start(
        self,
        *targets: types_pb2.Target.ValueType,
        scope: types_pb2.Scope.ValueType = FULL,
        version: str = "v1",
        **more: Any,
    ) -> str:
        """Open a session and return its id."""
        request = weight_sync_pb2.StartWeightUpdateRequest(
            request_id=str(uuid.uuid4()),
            targets=list(targets) or [VERIFIER],
            scope=scope,
            weight_version=version,
            **more,
        )
        return self.stub.StartWeightUpdate(request, timeout=60).session.session_id

    def send(
        self, messages: Iterable[weight_sync_pb2.UpdateWeightsRequest]
    ) -> weight_sync_pb2.UpdateWeightsResponse:
        """Send one stream."""
        return self.stub.UpdateWeights(iter(messages), timeout=60)

    def push(self, session_id: str, target: int, tensors: Tensors) -> None:
        """Send whole tensors, one per message."""
        self.send(chunk(session_id, target, {name: t}) for name, t in tensors.items())

    def session(self, session_id: str) -> weight_sync_pb2.GetWeightUpdateResponse:
        """Ask where a session stands."""
        request = weight_sync_pb2.GetWeightUpdateRequest(session_id=session_id)
        return self.stub.GetWeightUpdate(request, timeout=60)

    def finish(self, session_id: str) -> weight_sync_pb2.FinishWeightUpdateResponse:
        """Commit."""
        request = weight_sync_pb2.FinishWeightUpdateRequest(session_id=session_id)
        return self.stub.FinishWeightUpdate(request, timeout=60)

    def abort(self, session_id: str) -> types_pb2.Session:
        """Drop a session."""
        request = weight_sync_pb2.AbortWeightUpdateRequest(session_id=session_id)
        return self.stub.AbortWeightUpdate(request, timeout=60).session

    def worker(self) -> weight_sync_pb2.GetWorkerResponse:
        """Ask who is there."""
        return self.stub.GetWorker(weight_sync_pb2.GetWorkerRequest(), timeout=60)


def segment(target: int, name: str, tensor: torch.Tensor, /, **changed: Any) -> types_pb2.Segment:
    """Describe a whole tensor, with some fields changed."""
    fields: dict[str, Any] = {
        "target": target,
        "name": name,
        "dtype": from_torch(tensor.dtype).value,
        "shape": tensor.shape,
        "byte_length": tensor.nbytes,
    }
    return types_pb2.Segment(**(fields | changed))


def chunk(
    session_id: str, target: int, tensors: Tensors, /, **changed: Any
) -> weight_sync_pb2.UpdateWeightsRequest:
    """Put whole tensors into one message, with some fields of the message changed."""
    payload = b"".join(bits(tensor) for tensor in tensors.values())
    fields: dict[str, Any] = {
        "session_id": session_id,
        "segments": [segment(target, name, tensor) for name, tensor in tensors.items()],
        "checksum_type": types_pb2.CHECKSUM_TYPE_XXH3_64,
        "payload": payload,
    }
    message = weight_sync_pb2.UpdateWeightsRequest(**(fields | changed))
    if "checksum" not in changed:
        table = b"".join(segment.SerializeToString() for segment in message.segments)
        message.checksum = xxh3_64_intdigest(table + message.payload)
    return message


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    # A copy: an array over live memory would forbid the engine to free it.
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_bits(module: torch.nn.Module) -> dict[str, bytes]:
    """Return the bytes of all that a checkpoint of a module holds."""
    return {name: bits(tensor) for name, tensor in module.state_dict().items()}


def noise(module: torch.nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return new values for all that a checkpoint of a module holds; equal names stay tied."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in module.state_dict().items()
    }


@contextmanager
def told() -> Iterator[None]:
    """Raise within the block what the worker raised, from what gRPC brought."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(rpc_status.from_call(cast("grpc.Call", error))) from error


def code_of(error: WeightSyncError) -> grpc.StatusCode:
    """Return the status code with which an error of `told` came."""
    return cast("grpc.Call", error.__cause__).code()
