"""Whatever the layout and however it is cut, staged bytes are the parameter's bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.property.boxes import regions_of, shapes
from weightsync.arena.arena import ArenaBudget
from weightsync.arena.staging import Staging
from weightsync.core.dtypes import DType
from weightsync.core.regions import Region
from weightsync.core.types import Scope, Segment, Target, UpdateRequest
from weightsync.layout.plan import Layout, ParameterSpec, Placement, TensorPlan
from weightsync.layout.shares import Shares

VERIFIER = Target.VERIFIER
DTYPES = st.sampled_from(
    [DType.UINT8, DType.BFLOAT16, DType.FLOAT32, DType.INT64, DType.COMPLEX128]
)


def staging_of(layout: Layout, scope: Scope) -> Staging:
    """Return the staging of a session over one target."""
    layouts = {VERIFIER: layout}
    return Staging(
        UpdateRequest(frozenset([VERIFIER]), scope, "v"),
        layouts=layouts,
        shares=Shares(layouts),
        memory=lambda _key, spec: np.zeros((*spec.shape, spec.dtype.itemsize), np.uint8),
        budget=ArenaBudget(1 << 30),
        cast=lambda data, _source, _target: data,
    )


@st.composite
def placed(draw: st.DrawFn) -> tuple[Layout, np.ndarray]:
    """Draw a tensor whose axes lie in any order in one layer of a stacked parameter."""
    shape = draw(shapes(max_dims=3, max_size=4))
    dtype = draw(DTYPES)
    axes = draw(st.permutations(range(len(shape))))
    layers = draw(st.integers(1, 3))
    layer = draw(st.integers(0, layers - 1))
    permuted = tuple(shape[a] for a in axes)
    whole = Region.whole(shape)
    placement = Placement(
        whole, "p", Region((layer, *(0 for _ in shape)), (1, *permuted)), (None, *axes)
    )
    layout = Layout.of(
        [ParameterSpec("p", dtype, (layers, *permuted), "p")],
        [TensorPlan("t", dtype, shape, (placement,))],
    )
    size = whole.numel * dtype.itemsize
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 255, size, np.uint8)
    return layout, data.reshape(*shape, dtype.itemsize)


def cut(data: bytes, points: Sequence[int]) -> list[tuple[int, bytes]]:
    """Cut bytes at some points; return each piece with its offset."""
    ends = sorted({0, len(data), *(p % (len(data) + 1) for p in points)})
    return [(a, data[a:b]) for a, b in itertools.pairwise(ends)] or [(0, b"")]


@given(placed(), st.data())
def test_cut_shuffled_and_permuted_bytes_land_in_place(
    drawn: tuple[Layout, np.ndarray], data: st.DataObject
) -> None:
    """Any cover of a tensor by regions, cut anywhere, in any order, fills exactly its layer."""
    layout, array = drawn
    (plan,) = layout.tensors.values()
    (placement,) = plan.placements
    regions = [Region.whole(plan.shape), *data.draw(st.lists(regions_of(plan.shape), max_size=2))]
    messages = []
    for region in regions:
        bytes_ = array[region.slices].tobytes()
        for offset, piece in cut(bytes_, data.draw(st.lists(st.integers(0, 999), max_size=4))):
            segment = Segment(VERIFIER, "t", plan.dtype, plan.shape, region, offset, len(piece))
            messages.append((segment, piece))
    staging = staging_of(layout, Scope.FULL)
    for segment, piece in data.draw(st.permutations(messages)):
        staging.write([segment], memoryview(piece))
    assert staging.missing_bytes == 0
    assert not list(staging.missing())
    expected = array.transpose(*(a for a in placement.axes if a is not None), array.ndim - 1)
    for block in staging.blocks:
        ((box, memory),) = block.written()
        assert box == placement.dest
        assert np.array_equal(memory[0], expected)
        assert block.memory.sum(dtype=np.int64) == array.sum(dtype=np.int64)


@given(placed(), st.data())
def test_missing_is_exactly_what_was_not_sent(
    drawn: tuple[Layout, np.ndarray], data: st.DataObject
) -> None:
    """What is told to be missing, sent afterwards, completes a session that was cut short."""
    layout, array = drawn
    (plan,) = layout.tensors.values()
    pieces = cut(array.tobytes(), data.draw(st.lists(st.integers(0, 999), max_size=6)))
    whole = Region.whole(plan.shape)
    staging = staging_of(layout, Scope.FULL)
    for offset, piece in data.draw(st.lists(st.sampled_from(pieces), unique=True)):
        segment = Segment(VERIFIER, "t", plan.dtype, plan.shape, whole, offset, len(piece))
        staging.write([segment], memoryview(piece))
    told = 0
    for missing in list(staging.missing()):
        for region in missing.regions:
            bytes_ = array[region.slices].tobytes()
            told += len(bytes_)
            segment = Segment(VERIFIER, "t", plan.dtype, plan.shape, region, 0, len(bytes_))
            staging.write([segment], memoryview(bytes_))
        assert missing.missing_bytes == told
    assert staging.missing_bytes == 0
