"""What may be sent, in which pieces, and what is refused before a byte is kept."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.worker.feeding import (
    all_pieces,
    fresh,
    pieces,
    push,
    request,
    same_bits,
    send,
    state,
    unchanged,
)
from weightsync.apply.dtypes import to_torch
from weightsync.core.dtypes import DType
from weightsync.core.errors import (
    ArenaFullError,
    ChecksumMismatchError,
    DTypeMismatchError,
    InvalidRequestError,
    OverlapConflictError,
    ShapeMismatchError,
    UnknownTensorError,
    WeightSyncError,
)
from weightsync.core.regions import Region
from weightsync.core.types import (
    CastPolicy,
    ChecksumType,
    Limits,
    Scope,
    Segment,
    SessionState,
    SharedTensorPolicy,
    Target,
    UpdateMode,
)
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import Tiny
from weightsync.wire.chunk import Chunk

VERIFIER = Target.VERIFIER
DRAFT = Target.DRAFT
SHARED = ("embed.weight", "head.weight")
"""Tensors of the draft that are the verifier's storage."""


class Holder(nn.Module):
    """A module that holds given tensors as persistent buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def worker_of(module: nn.Module, **limits: int) -> Worker:
    """Return a worker of one module."""
    return Worker(ModuleEngine(module), limits=Limits(**limits))


@pytest.mark.parametrize("cut", [None, 1, 7, 64])
def test_the_cut_does_not_matter(cut: int | None, models: tuple[Tiny, Tiny]) -> None:
    """One message, or pieces of 7 bytes in reverse: equal bits (B36, B76)."""
    verifier, _ = models
    worker = worker_of(verifier)
    new = fresh(verifier.state_dict())
    session = worker.start(request())
    run = all_pieces(VERIFIER, new, cut)
    send(worker, session.session_id, [[piece] for piece in reversed(run)])
    worker.finish(session.session_id)
    assert unchanged(verifier, new)
    worker.close()


def test_every_dtype_in_one_session() -> None:
    """Random bits of each element type, NaN payloads included, arrive unchanged.

    B40, B42, B44, B48.
    """
    generator = torch.Generator().manual_seed(3)

    def random_bits(dtype: DType) -> torch.Tensor:
        high = 2 if dtype is DType.BOOL else 256
        data = torch.randint(0, high, (12 * dtype.itemsize,), generator=generator)
        return data.to(torch.uint8).view(to_torch(dtype)).reshape(3, 4)

    live = {f"t_{dtype}": random_bits(dtype) for dtype in DType}
    new = {f"t_{dtype}": random_bits(dtype) for dtype in DType}
    module = Holder(**live)
    worker = worker_of(module)
    session = worker.start(request())
    send(worker, session.session_id, [all_pieces(VERIFIER, new, 5)])
    worker.finish(session.session_id)
    assert unchanged(module, new)
    worker.close()


def test_scalars_and_empty_tensors_are_ordinary() -> None:
    """0-dim, zero-element and empty-shard tensors are sent, counted and committed (B43)."""
    live = {"scalar": torch.tensor(1.0), "empty": torch.empty(0), "rows": torch.empty(0, 4)}
    module = Holder(**live, full=torch.zeros(4, 2))
    worker = worker_of(module)
    session = worker.start(request())
    new = {"scalar": torch.tensor(2.0), "empty": torch.empty(0), "rows": torch.empty(0, 4)}
    push(worker, session.session_id, VERIFIER, new)
    full = torch.randn(4, 2)
    shards = [
        pieces(VERIFIER, "full", full, shape=(4, 2)),
        pieces(VERIFIER, "full", torch.empty(0, 2), region=Region((4, 0), (0, 2)), shape=(4, 2)),
    ]
    send(worker, session.session_id, shards)
    report = worker.finish(session.session_id)
    assert report.applied_tensors == 4
    assert unchanged(module, new | {"full": full})
    worker.close()


def test_shards_of_any_form_complete_a_tensor() -> None:
    """Row and column shards of a tensor, from two streams at once, make it whole (B54, B58)."""
    module = Holder(w=torch.zeros(6, 8, dtype=torch.bfloat16))
    worker = worker_of(module)
    new = torch.randn(6, 8).to(torch.bfloat16)
    session = worker.start(request())
    regions = [
        Region((row, column), (2, 4)) for row, column in itertools.product((0, 2, 4), (0, 4))
    ]
    with worker.stream(session.session_id), worker.stream(session.session_id):
        for region in regions:
            part = pieces(VERIFIER, "w", new[region.slices], region=region, shape=(6, 8), cut=5)
            send(worker, session.session_id, [[piece] for piece in part])
    worker.finish(session.session_id)
    assert same_bits(state(module)["w"], new)
    worker.close()


def test_overlaps_must_agree(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """The same bytes twice are harmless; other bytes for an element are an error (B18, B54)."""
    verifier, _ = models
    new = fresh(verifier.state_dict())
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, new)
    push(worker, session.session_id, VERIFIER, new)
    other = new["fc.weight"] + 1
    overlapping = pieces(
        VERIFIER, "fc.weight", other[1:3], region=Region((1, 0), (2, 4)), shape=(4, 4)
    )
    with pytest.raises(OverlapConflictError, match=r"fc\.weight"):
        send(worker, session.session_id, [overlapping])
    worker.finish(session.session_id)
    assert unchanged(verifier, new)


def test_two_regions_of_one_message_that_disagree_keep_nothing() -> None:
    """A message with a conflict inside itself is refused whole."""
    module = Holder(w=torch.zeros(4))
    worker = worker_of(module)
    session = worker.start(request(scope=Scope.PARTIAL))
    first = pieces(VERIFIER, "w", torch.ones(3), region=Region((0,), (3,)), shape=(4,))
    second = pieces(VERIFIER, "w", torch.zeros(2), region=Region((2,), (2,)), shape=(4,))
    with pytest.raises(OverlapConflictError):
        send(worker, session.session_id, [[*first, *second]])
    assert worker.missing(session.session_id, 0, 10) == ([], None)
    push(worker, session.session_id, VERIFIER, {"w": torch.full((4,), 7.0)})
    worker.finish(session.session_id)
    assert same_bits(state(module)["w"], torch.full((4,), 7.0))
    worker.close()


def test_two_names_of_one_storage_must_agree() -> None:
    """Both names of a tied pair with equal values are fine, with other values an error (B18)."""
    model = Tiny()
    model.head.weight = model.embed.weight
    worker = worker_of(model)
    new = fresh(model.state_dict())
    new["head.weight"] = new["embed.weight"]
    session = worker.start(request())
    push(worker, session.session_id, VERIFIER, new)
    with pytest.raises(OverlapConflictError):
        push(worker, session.session_id, VERIFIER, {"head.weight": new["head.weight"] + 1})
    worker.finish(session.session_id)
    assert unchanged(model, new)
    worker.close()


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({"fc.wieght": torch.zeros(4, 4)}, UnknownTensorError, "fc.weight"),
        ({"fc.weight": torch.zeros(4)}, ShapeMismatchError, r"\[4, 4\]"),
        ({"fc.weight": torch.zeros(1, 4)}, ShapeMismatchError, r"\[1, 4\]"),
        ({"fc.weight": torch.zeros(12, 4)}, ShapeMismatchError, "fc.weight"),
        ({"fc.weight": torch.zeros(4, 4).half()}, DTypeMismatchError, "float16"),
        ({"fc.weight": torch.zeros(4, 4, dtype=torch.int32)}, DTypeMismatchError, "int32"),
    ],
)
def test_a_refused_message_leaves_the_session_and_the_weights(
    worker: Worker,
    models: tuple[Tiny, Tiny],
    tensors: dict[str, torch.Tensor],
    error: type[WeightSyncError],
    words: str,
) -> None:
    """Unknown name, wrong shape (never broadcast), wrong dtype: named, and the session goes on.

    B17, B41, B49, B50.
    """
    verifier, _ = models
    before, new = state(verifier), fresh(verifier.state_dict())
    session = worker.start(request())
    with pytest.raises(error, match=words):
        push(worker, session.session_id, VERIFIER, tensors)
    assert unchanged(verifier, before)
    push(worker, session.session_id, VERIFIER, new)
    worker.finish(session.session_id)
    assert unchanged(verifier, new)


def test_bool_bytes_are_zero_or_one() -> None:
    """A byte that is no bool never reaches a bool tensor."""
    module = Holder(mask=torch.zeros(3, dtype=torch.bool))
    worker = worker_of(module)
    session = worker.start(request())
    segment = Segment(VERIFIER, "mask", DType.BOOL, (3,), Region((0,), (3,)), 0, 3)
    with pytest.raises(InvalidRequestError, match="mask"):
        send(worker, session.session_id, [[(segment, memoryview(b"\x00\x01\x02"))]])
    worker.close()


@pytest.mark.parametrize(
    ("live", "sent"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.int64, torch.int32),
        (torch.complex128, torch.complex64),
    ],
)
def test_casts_that_a_session_allows(live: torch.dtype, sent: torch.dtype) -> None:
    """With cast=ALLOW the worker holds exactly what `Tensor.to` gives, shards included (B41)."""
    module = Holder(w=torch.zeros(6, 4).to(live))
    worker = worker_of(module)
    values = (torch.randn(6, 4) * 8).to(sent)
    session = worker.start(request(cast=CastPolicy.ALLOW))
    for region in (Region((0, 0), (6, 3)), Region((0, 3), (6, 1))):
        part = pieces(
            VERIFIER,
            "w",
            values[region.slices],
            region=region,
            shape=(6, 4),
            cut=4 * sent.itemsize,
        )
        send(worker, session.session_id, [[piece] for piece in part])
    worker.finish(session.session_id)
    assert same_bits(state(module)["w"], values.to(live))
    worker.close()


@pytest.mark.parametrize(
    ("live", "sent"),
    [
        (torch.float32, torch.complex64),
        (torch.int8, torch.float32),
        (torch.bool, torch.float32),
        (torch.int8, torch.int32),
        (torch.float32, torch.bool),
    ],
)
def test_casts_that_nobody_can_mean(live: torch.dtype, sent: torch.dtype) -> None:
    """Complex to real, float to int, anything with bool, narrowing: refused even with ALLOW.

    B41, B44.
    """
    module = Holder(w=torch.zeros(4).to(live))
    worker = worker_of(module)
    session = worker.start(request(cast=CastPolicy.ALLOW))
    with pytest.raises(DTypeMismatchError, match="never done"):
        push(worker, session.session_id, VERIFIER, {"w": torch.zeros(4).to(sent)})
    worker.close()


def test_a_cast_needs_whole_elements() -> None:
    """A message that ends inside an element can't be cast, and says so."""
    worker = worker_of(Holder(w=torch.zeros(4, dtype=torch.bfloat16)))
    session = worker.start(request(cast=CastPolicy.ALLOW))
    with pytest.raises(InvalidRequestError, match="whole elements"):
        send(worker, session.session_id, [pieces(VERIFIER, "w", torch.zeros(4), cut=7)])
    worker.close()


def test_ignored_names_are_counted_not_applied(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A pattern lets a training-only head pass; it is listed, and alone it is not enough.

    B17, B25.
    """
    verifier, _ = models
    new = fresh(verifier.state_dict())
    session = worker.start(request(ignore_names=("confidence_head.*",)))
    extra = {"confidence_head.weight": torch.zeros(3)}
    push(worker, session.session_id, VERIFIER, new | extra)
    report = worker.finish(session.session_id)
    assert report.ignored_names == ("confidence_head.weight",)
    assert report.applied_tensors == len(new)
    assert unchanged(verifier, new)


def test_a_changed_payload_is_not_stored(worker: Worker, models: tuple[Tiny, Tiny]) -> None:
    """A checksum that does not fit keeps the session open; the same message sent well is taken."""
    verifier, _ = models
    new = fresh(verifier.state_dict())
    session = worker.start(request())
    run = all_pieces(VERIFIER, new)
    segments = tuple(segment for segment, _ in run)
    payload = b"".join(data for _, data in run)
    with worker.stream(session.session_id) as sink:
        bad = Chunk("", segments, ChecksumType.XXH3_64, 1, memoryview(payload))
        with pytest.raises(ChecksumMismatchError):
            sink.write(bad)
        assert worker.update(session.session_id).received_bytes == 0
    send(worker, session.session_id, [run])
    worker.finish(session.session_id)
    assert unchanged(verifier, new)


@pytest.mark.parametrize("scope", Scope)
def test_the_arena_limit_is_told_before_anything_is_sent(scope: Scope) -> None:
    """A session that may bring more than fits is refused at start, whatever it would bring."""
    module = Holder(big=torch.zeros(1000), small=torch.zeros(10))
    worker = worker_of(module, max_arena_bytes=4039)
    with pytest.raises(ArenaFullError, match="4039"):
        worker.start(request(scope=scope))
    assert worker.info().targets[0].session_id == ""
    assert worker.staging_bytes == 0
    in_place = worker.start(request(scope=scope, mode=UpdateMode.IN_PLACE))
    worker.abort(in_place.session_id)
    worker.close()


@pytest.mark.parametrize("policy", SharedTensorPolicy)
@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("targets", [{VERIFIER}, {DRAFT}, {VERIFIER, DRAFT}])
def test_a_session_that_was_taken_never_runs_out_of_room(
    models: tuple[Tiny, Tiny], targets: set[Target], scope: Scope, policy: SharedTensorPolicy
) -> None:
    """With a limit at what it takes when it starts, a session can bring all that it may."""
    wanted = request(*targets, scope=scope, shared_tensors=policy)
    roomy = Worker(ModuleEngine(*models))
    roomy.start(wanted)
    limit = roomy.staging_bytes
    roomy.close()
    worker = Worker(ModuleEngine(*models), limits=Limits(max_arena_bytes=limit))
    session = worker.start(wanted)
    leave_out = policy is SharedTensorPolicy.REFUSE and VERIFIER not in targets
    for target, model in zip((VERIFIER, DRAFT), models, strict=True):
        new = {n: t for n, t in state(model).items() if not (leave_out and n in SHARED)}
        if target in targets:
            push(worker, session.session_id, target, new)
    assert worker.staging_bytes == limit
    worker.finish(session.session_id)
    assert worker.staging_bytes == 0
    worker.close()


def test_a_tensor_for_a_target_outside_the_session_is_refused(
    worker: Worker, models: tuple[Tiny, Tiny]
) -> None:
    """A verifier session takes no draft tensors, and never puts them elsewhere (B03)."""
    verifier, draft = models
    before = state(verifier), state(draft)
    session = worker.start(request())
    with pytest.raises(InvalidRequestError, match="draft"):
        push(worker, session.session_id, Target.DRAFT, {"fc.weight": torch.zeros(4, 4)})
    assert worker.abort(session.session_id).state is SessionState.ABORTED
    assert unchanged(verifier, before[0])
    assert unchanged(draft, before[1])
