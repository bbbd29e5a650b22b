"""A trainer's whole side on plain gRPC stubs; arrays of JAX become numpy's by `np.asarray`.

Run it: python bare_stubs.py ADDRESS WEIGHTS.npz VERSION
WEIGHTS.npz holds every tensor of the verifier under its checkpoint name (`np.savez`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import grpc
import numpy as np
import xxhash

from weightsync.v1 import types_pb2 as types
from weightsync.v1 import weight_sync_pb2 as messages
from weightsync.v1.weight_sync_pb2_grpc import WeightSyncStub


def chunks(
    session_id: str, weights: Mapping[str, np.ndarray], size: int
) -> Iterator[messages.UpdateWeightsRequest]:
    """Cut each tensor into messages of at most `size` bytes of payload."""
    for name, array in weights.items():
        data = array.tobytes()  # row-major, little-endian, without holes
        for start in range(0, len(data) or 1, size):
            payload = data[start : start + size]
            segment = types.Segment(
                target=types.TARGET_VERIFIER,
                name=name,
                dtype=types.DataType.Value(f"DATA_TYPE_{array.dtype.name.upper()}"),
                shape=array.shape,
                byte_offset=start,
                byte_length=len(payload),
            )
            yield messages.UpdateWeightsRequest(
                session_id=session_id,
                segments=[segment],
                checksum_type=types.CHECKSUM_TYPE_XXH3_64,
                checksum=xxhash.xxh3_64_intdigest(segment.SerializeToString() + payload),
                payload=payload,
            )


def push(address: str, weights: Mapping[str, np.ndarray], version: str) -> None:
    """Make the weights live on a worker; if anything fails, the old ones serve on."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        worker = WeightSyncStub(channel)
        start = messages.StartWeightUpdateRequest(
            targets=[types.TARGET_VERIFIER], scope=types.SCOPE_FULL, weight_version=version
        )
        started = worker.StartWeightUpdate(start, timeout=30)
        session_id = started.session.session_id
        worker.UpdateWeights(chunks(session_id, weights, started.max_payload_bytes), timeout=600)
        finish = messages.FinishWeightUpdateRequest(session_id=session_id)
        done = worker.FinishWeightUpdate(finish, timeout=60)
        print(f"{done.applied_tensors} tensors, {done.applied_bytes} bytes: {version} is live")


if __name__ == "__main__":
    push(sys.argv[1], np.load(sys.argv[2]), sys.argv[3])
