"""A trainer's whole side on plain gRPC stubs and numpy.

Run it: python bare_stubs.py ADDRESS WEIGHTS.npz VERSION
WEIGHTS.npz holds each tensor of the verifier by its checkpoint name; JAX: `np.savez(**params)`.
"""

import sys
from collections.abc import Iterator, Mapping

import grpc
import numpy as np
import xxhash

from weightsync.v1 import types_pb2 as types
from weightsync.v1 import weight_sync_pb2 as messages
from weightsync.v1.weight_sync_pb2_grpc import WeightSyncStub

Chunks = Iterator[messages.UpdateWeightsRequest]


def chunks(session: str, weights: Mapping[str, np.ndarray], size: int) -> Chunks:
    """Cut each tensor into messages of at most `size` bytes of payload."""
    for name, array in weights.items():
        data = array.tobytes()  # row-major, little-endian, without holes
        for start in range(0, len(data) or 1, size):
            payload = data[start : start + size]
            segment = types.Segment(target=types.TARGET_VERIFIER, name=name, shape=array.shape)
            segment.dtype = types.DataType.Value(f"DATA_TYPE_{array.dtype.name.upper()}")
            segment.byte_offset, segment.byte_length = start, len(payload)
            chunk = messages.UpdateWeightsRequest(session_id=session, segments=[segment])
            chunk.checksum_type = types.CHECKSUM_TYPE_XXH3_64
            chunk.checksum = xxhash.xxh3_64_intdigest(segment.SerializeToString() + payload)
            chunk.payload = payload
            yield chunk


def push(address: str, weights: Mapping[str, np.ndarray], version: str) -> None:
    """Make the weights live on a worker; if anything fails, the old ones serve on."""
    worker = WeightSyncStub(grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]))
    wanted = messages.StartWeightUpdateRequest(scope=types.SCOPE_FULL, weight_version=version)
    wanted.targets.append(types.TARGET_VERIFIER)
    start = worker.StartWeightUpdate(wanted, timeout=30)
    session = start.session.session_id
    worker.UpdateWeights(chunks(session, weights, start.max_payload_bytes), timeout=600)
    finish = messages.FinishWeightUpdateRequest(session_id=session)
    done = worker.FinishWeightUpdate(finish, timeout=60)
    print(f"{done.applied_tensors} tensors, {done.applied_bytes} bytes: {version} is live")


if __name__ == "__main__":
    push(sys.argv[1], np.load(sys.argv[2]), sys.argv[3])
