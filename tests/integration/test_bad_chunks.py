from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from grpc import StatusCode as Code

from tests.integration.raw import (
    DRAFT,
    PARTIAL,
    VERIFIER,
    RawTrainer,
    bits,
    chunk,
    code_of,
    segment,
    told,
)
from weightsync.core.errors import (
    ChecksumMismatchError,
    DTypeMismatchError,
    InvalidRequestError,
    MalformedPayloadError,
    OutOfBoundsError,
    OverlapConflictError,
    ShapeMismatchError,
    UnknownTensorError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.testing.models import Tiny
from weightsync.v1 import types_pb2, weight_sync_pb2

Models = tuple[Tiny, Tiny]
Message = weight_sync_pb2.UpdateWeightsRequest

WHOLE = torch.full((4, 4), 7.0)
"""A right value for `fc.weight`."""


def of(name: str, tensor: torch.Tensor, **changed: Any) -> Callable[[str], Message]:
    """Return what makes a message of one whole tensor, its segment changed."""

    def make(session: str) -> Message:
        payload = bits(tensor)
        return chunk(
            session, VERIFIER, {name: tensor},
            segments=[segment(VERIFIER, name, tensor, **changed)],
            payload=payload,
        )  # fmt: skip

    return make


def changed(**fields: Any) -> Callable[[str], Message]:
    """Return what makes a right message with some of its fields changed."""
    return lambda session: chunk(session, VERIFIER, {"fc.weight": WHOLE}, **fields)


HUGE = 2**63

CHUNKS = {
    "unknown tensor": (of("fc.weigth", WHOLE), UnknownTensorError, Code.NOT_FOUND, "fc.weight"),
    "name with a wrapper's prefix": (
        of("module.fc.weight", WHOLE), UnknownTensorError, Code.NOT_FOUND, "fc.weight"),
    "buffer that is in no checkpoint": (
        of("rot", torch.zeros(4)), UnknownTensorError, Code.NOT_FOUND, "rot"),
    "name of 1 MB": (
        of("x" * (1 << 20), WHOLE), InvalidRequestError, Code.INVALID_ARGUMENT, "name"),
    "transposed shape": (
        of("head.weight", torch.zeros(4, 10)),
        ShapeMismatchError, Code.INVALID_ARGUMENT, "10, 4"),
    "shape that would broadcast": (
        of("fc.weight", torch.zeros(1, 4)), ShapeMismatchError, Code.INVALID_ARGUMENT, "4, 4"),
    "equal count, other shape": (
        of("fc.weight", torch.zeros(16)), ShapeMismatchError, Code.INVALID_ARGUMENT, "4, 4"),
    "other type of equal size": (
        of("fc.weight", torch.zeros(4, 4, dtype=torch.int32)),
        DTypeMismatchError, Code.INVALID_ARGUMENT, "float32"),
    "half of the bytes": (
        of("fc.weight", WHOLE.bfloat16()), DTypeMismatchError, Code.INVALID_ARGUMENT, "bfloat16"),
    "unknown type": (
        of("fc.weight", WHOLE, dtype=99), InvalidRequestError, Code.INVALID_ARGUMENT, "dtype"),
    "no type": (
        of("fc.weight", WHOLE, dtype=0), InvalidRequestError, Code.INVALID_ARGUMENT, "dtype"),
    "no target": (
        of("fc.weight", WHOLE, target=0), InvalidRequestError, Code.INVALID_ARGUMENT, "target"),
    "target outside the session": (
        of("fc.weight", WHOLE, target=DRAFT), InvalidRequestError, Code.INVALID_ARGUMENT, "draft"),
    "unknown encoding": (
        of("fc.weight", WHOLE, encoding=99), UnsupportedError, Code.UNIMPLEMENTED, "encoding"),
    "count of 2**63": (
        of("fc.weight", WHOLE, shape=[HUGE]), WeightSyncError, Code.INVALID_ARGUMENT, ""),
    "product beyond 64 bits": (
        of("fc.weight", WHOLE, shape=[HUGE, HUGE]), WeightSyncError, Code.INVALID_ARGUMENT, ""),
    "100 dimensions": (
        of("fc.weight", WHOLE, shape=[1] * 100), WeightSyncError, Code.INVALID_ARGUMENT, ""),
    "region outside": (
        of("fc.weight", WHOLE, region=types_pb2.Region(offsets=[1, 0], sizes=[4, 4])),
        OutOfBoundsError, Code.INVALID_ARGUMENT, "fc.weight"),
    "region of other dimensions": (
        of("fc.weight", WHOLE, region=types_pb2.Region(offsets=[0], sizes=[16])),
        WeightSyncError, Code.INVALID_ARGUMENT, ""),
    "bytes behind the region": (
        of("fc.weight", WHOLE, byte_offset=1), OutOfBoundsError, Code.INVALID_ARGUMENT, ""),
    "offset of 2**63": (
        of("fc.weight", WHOLE, byte_offset=HUGE), OutOfBoundsError, Code.INVALID_ARGUMENT, ""),
    "length of 2**63": (
        of("fc.weight", WHOLE, byte_length=HUGE), WeightSyncError, Code.INVALID_ARGUMENT, ""),
    "truncated payload": (
        changed(payload=bits(WHOLE)[:-1]), MalformedPayloadError, Code.INVALID_ARGUMENT, "63"),
    "payload too long": (
        changed(payload=bits(WHOLE) + b"\0"), MalformedPayloadError, Code.INVALID_ARGUMENT, "65"),
    "no payload": (
        changed(payload=b""), MalformedPayloadError, Code.INVALID_ARGUMENT, "0"),
    "wrong checksum": (
        changed(checksum=1), ChecksumMismatchError, Code.ABORTED, ""),
    "no checksum type": (
        changed(checksum_type=0), InvalidRequestError, Code.INVALID_ARGUMENT, "checksum_type"),
    "unknown checksum type": (
        changed(checksum_type=99), InvalidRequestError, Code.INVALID_ARGUMENT, "checksum_type"),
}  # fmt: skip


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("case", CHUNKS)
def test_a_bad_chunk_is_refused(trainer: RawTrainer, models: Models, case: str) -> None:
    """A bad chunk gets its own clear error, stores nothing, and leaves the session usable."""
    make, kind, code, text = CHUNKS[case]
    session = trainer.start(VERIFIER)
    with pytest.raises(kind) as caught, told():
        trainer.send([make(session)])
    assert code_of(caught.value) is code
    assert text in f"{caught.value} {' '.join(caught.value.subjects)}"
    assert len(str(caught.value)) < 2000
    state = trainer.session(session)
    assert state.session.state == types_pb2.SESSION_STATE_OPEN
    assert state.session.missing_bytes == sum(t.nbytes for t in models[0].state_dict().values())
    trainer.abort(session)


@pytest.mark.parametrize("cut", [1, 20, 60, 100])
@pytest.mark.usefixtures("old")
def test_a_message_cut_short_is_refused(trainer: RawTrainer, cut: int) -> None:
    """The first bytes of a message are no message, wherever it was cut."""
    session = trainer.start(VERIFIER)
    data = chunk(session, VERIFIER, {"fc.weight": WHOLE}).SerializeToString()
    send: Any = trainer.channel.stream_unary("/weightsync.v1.WeightSync/UpdateWeights")
    with pytest.raises(WeightSyncError) as caught, told():
        send(iter([data[:cut]]), timeout=60)
    assert code_of(caught.value) is Code.INVALID_ARGUMENT
    assert trainer.session(session).session.received_bytes == 0


@pytest.mark.usefixtures("old")
def test_the_good_chunks_before_a_bad_one_stay(trainer: RawTrainer) -> None:
    """What came before the bad chunk of a stream is in the session, what came after is not."""
    session = trainer.start(VERIFIER)
    with pytest.raises(UnknownTensorError), told():
        trainer.send(
            [
                chunk(session, VERIFIER, {"fc.weight": WHOLE}),
                chunk(session, VERIFIER, {"fc.bias": torch.ones(4), "nobody": torch.ones(4)}),
                chunk(session, VERIFIER, {"ln.bias": torch.ones(4)}),
            ]
        )
    missing = {m.name for m in trainer.session(session).missing}
    assert "fc.weight" not in missing
    assert {"fc.bias", "ln.bias"} <= missing


@pytest.mark.usefixtures("old")
def test_bytes_that_differ_in_an_overlap_are_refused(trainer: RawTrainer) -> None:
    """The same bytes twice are harmless; others in the same place are refused."""
    session = trainer.start(VERIFIER, scope=PARTIAL)
    good = chunk(session, VERIFIER, {"fc.weight": WHOLE})
    trainer.send([good, good])
    rows = segment(
        VERIFIER, "fc.weight", WHOLE, byte_length=32,
        region=types_pb2.Region(offsets=[1, 0], sizes=[2, 4]),
    )  # fmt: skip
    with pytest.raises(OverlapConflictError) as caught, told():
        trainer.send([chunk(session, VERIFIER, {}, segments=[rows], payload=bits(WHOLE[:2] + 1))])
    assert code_of(caught.value) is Code.INVALID_ARGUMENT
    assert "fc.weight" in str(caught.value)
