from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightsync_client.chunker import Chunker, Message
from weightsync_client.names import NameMapping
from weightsync_client.planner import Needs, Planner
from weightsync_client.router import Router
from weightsync_client.shards import Shard, digest
from weightsync_client.sources.bytes_array import BytesArray

from weightsync.core.dtypes import DType
from weightsync.core.errors import DTypeMismatchError, ShapeMismatchError, UnknownTensorError
from weightsync.core.regions import Region
from weightsync.core.types import (
    CastPolicy,
    ChecksumType,
    Limits,
    Scope,
    SharedTensorPolicy,
    Target,
    TensorKey,
    UpdateRequest,
)
from weightsync.core.views import MissingTensor, TensorInfo
from weightsync.wire.chunk import Chunk, parse_chunk

KEY = TensorKey(Target.VERIFIER, "w")
REQUEST = UpdateRequest(frozenset(Target), Scope.FULL, "v1")


def info(
    shape: tuple[int, ...],
    *regions: Region,
    name: str = "w",
    dtype: DType = DType.INT16,
    **more: Any,
) -> TensorInfo:
    """Return an entry of a worker's list; without regions the worker needs all."""
    return TensorInfo(
        more.pop("target", Target.VERIFIER),
        name,
        dtype,
        shape,
        regions or (Region.whole(shape),),
        **more,
    )


def planner(*workers: list[TensorInfo], request: UpdateRequest = REQUEST, **more: Any) -> Planner:
    """Return a planner for workers with these lists."""
    return Planner([Needs(tensors, request) for tensors in workers], request, **more)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Draw a region of a shape, empty ones included."""
    ends = [sorted((draw(st.integers(0, s)), draw(st.integers(0, s)))) for s in shape]
    return Region(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Region]], list[Region]]:
    """Draw a shape, what each worker needs of it, and the shards of the senders."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    workers = draw(st.lists(st.lists(boxes(shape), min_size=1, max_size=3), min_size=1, max_size=3))
    shards = draw(st.lists(boxes(shape), min_size=1, max_size=4))
    return shape, workers, shards


class Workers:
    """Puts together what arrives on each worker; elements are 16-bit and not 0."""

    def __init__(self, shape: tuple[int, ...], number: int) -> None:
        """Start with zeros everywhere."""
        self.tensors = [np.zeros(shape, np.int16) for _ in range(number)]
        self.chunks: list[Chunk] = []

    def take(self, group: tuple[int, ...], message: Message, _first: bool) -> None:
        """Take a message on each worker of a group."""
        chunk = parse_chunk(message.data, Limits())
        self.chunks.append(chunk)
        position = 0
        for segment in chunk.segments:
            end = position + segment.byte_length
            run = np.zeros(segment.region.numel, np.int16)
            run.view(np.uint8)[segment.byte_offset :][: segment.byte_length] = np.frombuffer(
                chunk.payload[position:end], np.uint8
            )
            box = run.reshape(segment.region.sizes)
            position = end
            for worker in group:
                here = self.tensors[worker][segment.region.slices]
                self.tensors[worker][segment.region.slices] = np.where(box == 0, here, box)


@given(cases(), st.integers(16, 64), st.integers(1, 4), st.booleans())
def test_each_worker_gets_exactly_what_it_needs(
    case: tuple[tuple[int, ...], list[list[Region]], list[Region]],
    max_payload: int,
    max_segments: int,
    own: bool,
) -> None:
    """What arrives on each worker, put together, is its regions of what the shards hold."""
    shape, needed, shards = case
    whole = np.arange(1, 1 + int(np.prod(shape, dtype=int)), dtype=np.int16).reshape(shape)
    workers = Workers(shape, len(needed))
    router = Router(
        planner(*([info(shape, *regions)] for regions in needed)),
        (),
        lambda _workers, emit: Chunker(
            emit,
            max_payload_bytes=max_payload,
            max_segments=max_segments,
            checksum=ChecksumType.CRC32C,
        ),
        workers.take,
    )
    for region in shards:
        scratch = np.array(whole[region.slices])
        shard = Shard("w", BytesArray.from_numpy(scratch, "w"), shape, region)
        router.route(shard, Target.VERIFIER, NameMapping())
        if own:
            router.own()
            scratch[...] = -1  # The sender reuses its memory.
    router.flush()

    assert all(len(chunk.payload) <= max_payload for chunk in workers.chunks)
    assert all(len(chunk.segments) <= max_segments for chunk in workers.chunks)
    for regions, got in zip(needed, workers.tensors, strict=True):
        expected = np.zeros(shape, np.int16)
        for common in (a.intersect(b) for a in regions for b in shards):
            if common is not None:
                expected[common.slices] = whole[common.slices]
        assert got.tobytes() == expected.tobytes()


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(16, 64))
def test_small_tensors_share_messages(sizes: list[int], max_payload: int) -> None:
    """Messages are full: their number is that of the bytes, not that of the tensors."""
    messages: list[Message] = []
    chunker = Chunker(
        messages.append,
        max_payload_bytes=max_payload,
        max_segments=1000,
        checksum=ChecksumType.NONE,
    )
    for size in sizes:
        array = BytesArray.from_numpy(np.zeros(size, np.uint8), "w")
        chunker.add(KEY, (size,), Region.whole((size,)), array, Region.whole((size,)))
    chunker.flush()
    assert len(messages) == -(-sum(sizes) // max_payload)


def test_headers_are_bounded_like_payloads() -> None:
    """Thousands of tiny tensors with long names still make messages below gRPC's limit."""
    limits = Limits()
    messages: list[Message] = []
    chunker = Chunker(
        messages.append,
        max_payload_bytes=limits.max_payload_bytes,
        max_segments=limits.max_segments,
        checksum=ChecksumType.XXH3_64,
    )
    array = BytesArray.from_numpy(np.zeros(600, np.float32), "w")
    for index in range(5000):
        key = TensorKey(Target.VERIFIER, f"{'ö' * 400}.{index}")
        chunker.add(key, (600,), Region.whole((600,)), array, Region.whole((600,)))
    chunker.flush()
    assert max(len(message.data) for message in messages) <= limits.max_message_bytes
    assert sum(message.payload_bytes for message in messages) == 5000 * 2400


def test_workers_with_equal_needs_share_messages() -> None:
    """Replicas form one group, and a shard of another rank a group of its own."""
    left, right = Region((0, 0), (2, 4)), Region((2, 0), (2, 4))
    plan = planner([info((4, 4), left)], [info((4, 4), right)], [info((4, 4), left)])
    deliveries = plan.plan(KEY, DType.INT16, (4, 4), Region.whole((4, 4)))
    assert [(d.workers, d.boxes) for d in deliveries] == [((0, 2), (left,)), ((1,), (right,))]


def test_a_kv_head_goes_to_every_rank_that_needs_it() -> None:
    """B53: with fewer heads than ranks the same slice goes to several workers, in one message."""
    heads = [Region((0, 0), (1, 4)), Region((1, 0), (1, 4))]
    plan = planner(*([info((2, 4), heads[rank // 2])] for rank in range(4)))
    deliveries = plan.plan(KEY, DType.INT16, (2, 4), Region.whole((2, 4)))
    assert [d.workers for d in deliveries] == [(0, 1), (2, 3)]


def test_names_of_one_storage_go_under_the_owners_name() -> None:
    """A shared tensor travels once: all its names become the first one of the session."""
    draft = TensorKey(Target.DRAFT, "d.w")
    tensors = [
        info((4,), name="d.w", target=Target.DRAFT, share_group="g"),
        info((4,), share_group="g"),
    ]
    (delivery,) = planner(tensors).plan(draft, DType.INT16, (4,), Region.whole((4,)))
    assert (delivery.key, delivery.tied) == (KEY, True)
    apart = replace(REQUEST, shared_tensors=SharedTensorPolicy.UNSHARE)
    (delivery,) = planner(tensors, request=apart).plan(draft, DType.INT16, (4,), Region.whole((4,)))
    assert (delivery.key, delivery.tied) == (draft, False)


def test_the_total_counts_each_storage_once() -> None:
    """Ties, replicas and composites add nothing to the bytes of a full session."""
    tensors = [
        info((4,), share_group="g"),
        info((4,), name="head", share_group="g"),
        info((8,), name="fused", composite=True),
        info((3,), name="norm"),
    ]
    assert planner(tensors, tensors).total_bytes() == 14
    partial = replace(REQUEST, scope=Scope.PARTIAL)
    assert planner(tensors, request=partial).total_bytes() is None


def test_shapes_must_be_equal() -> None:
    """B12, B49, B50: other rows, a transposed or a flat shape are refused with both shapes."""
    plan = planner([info((12, 4))])
    for shape in [(10, 4), (4, 12), (48,), ()]:
        with pytest.raises(ShapeMismatchError, match=r"12, 4"):
            plan.plan(KEY, DType.INT16, shape, Region.whole(shape))


@pytest.mark.parametrize(("sender", "worker", "rows"), [(10, 12, 10), (12, 10, 10)])
def test_rows_may_differ_when_asked_for(sender: int, worker: int, rows: int) -> None:
    """B50: with rows="prefix" the rows that both sides have are sent, and no others."""
    plan = planner([info((worker, 4))], rows="prefix")
    (delivery,) = plan.plan(KEY, DType.INT16, (sender, 4), Region.whole((sender, 4)))
    assert delivery.shape == (worker, 4)
    assert delivery.boxes == (Region((0, 0), (rows, 4)),)
    with pytest.raises(ShapeMismatchError):
        plan.plan(KEY, DType.INT16, (sender, 5), Region.whole((sender, 5)))


def test_types_must_be_equal_unless_the_session_casts() -> None:
    """B41: another element type is refused before a byte is sent, and meaningless casts always."""
    bf16 = [info((4,), dtype=DType.BFLOAT16)]
    casting = replace(REQUEST, cast=CastPolicy.ALLOW)
    with pytest.raises(DTypeMismatchError, match="cast"):
        planner(bf16).plan(KEY, DType.FLOAT32, (4,), Region.whole((4,)))
    assert planner(bf16, request=casting).plan(KEY, DType.FLOAT32, (4,), Region.whole((4,)))
    with pytest.raises(DTypeMismatchError):
        planner(bf16, request=casting).plan(KEY, DType.INT8, (4,), Region.whole((4,)))


def test_a_tensor_that_no_worker_has_is_an_error() -> None:
    """A name counts as known if one worker has it, e.g. the stage that owns the layer."""
    other = TensorKey(Target.VERIFIER, "other")
    plan = planner([info((4,))], [info((4,), name="other")])
    assert set(plan.names(Target.VERIFIER)) == {"w", "other"}
    (delivery,) = plan.plan(other, DType.INT16, (4,), Region.whole((4,)))
    assert delivery.workers == (1,)
    with pytest.raises(UnknownTensorError):
        plan.plan(TensorKey(Target.DRAFT, "w"), DType.INT16, (4,), Region.whole((4,)))


def test_only_what_is_missing_is_planned_after_a_crash() -> None:
    """Restricted needs are the missing regions, found by any name of the storage."""
    tensors = [info((4, 2), share_group="g"), info((4, 2), name="head", share_group="g")]
    needs = Needs(tensors, REQUEST)
    hole = Region((1, 0), (2, 2))
    needs.restrict([MissingTensor(Target.VERIFIER, "head", (hole,), 8)])
    plan = Planner([needs], REQUEST)
    (delivery,) = plan.plan(KEY, DType.INT16, (4, 2), Region.whole((4, 2)))
    assert delivery.boxes == (hole,)
    assert plan.plan(KEY, DType.INT16, (4, 2), Region((3, 0), (1, 2))) == []


@given(st.integers(0, 7), st.integers(1, 8), st.integers(0, 7), st.integers(1, 8))
def test_a_message_is_sent_again_only_if_it_holds_missing_bytes(
    start: int, length: int, hole: int, size: int
) -> None:
    """After a lost connection a message goes again exactly if it meets what is missing."""
    length, size = min(length, 8 - start), min(size, 8 - hole)
    messages: list[Message] = []
    chunker = Chunker(
        messages.append, max_payload_bytes=1024, max_segments=8, checksum=ChecksumType.NONE
    )
    array = BytesArray.from_numpy(np.zeros(8, np.int16), "w")
    chunker.add(KEY, (8,), Region((start,), (length,)), array, Region.whole((8,)))
    chunker.flush()
    missing = [MissingTensor(Target.VERIFIER, "w", (Region((hole,), (size,)),), 2 * size)]
    meets = start < hole + size and hole < start + length
    assert Needs([info((8,))], REQUEST).lacks(messages[0].segments, missing) is meets


def test_a_digest_does_not_depend_on_how_an_array_is_read() -> None:
    """Strides and block sizes leave the digest of a region as it is."""
    values = np.arange(600, dtype=np.float32).reshape(20, 30)
    turned = BytesArray.from_numpy(np.asfortranarray(values), "w")
    box = Region((3, 4), (11, 13))
    straight = BytesArray.from_numpy(values[box.slices].copy(), "w")
    assert digest(turned, box) == digest(straight, Region.whole((11, 13)))
