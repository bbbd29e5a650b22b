from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
dtensor = pytest.importorskip("weightsync_client.sources.dtensor")


@given(st.integers(0, 20), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_nested_shards_are_those_of_torch(size: int, parts: list[int]) -> None:
    """Sharding one dimension over several mesh axes gives the indices that torch gives."""
    for coordinate in itertools.product(*map(range, parts)):
        ranges = [range(size)]
        indices = torch.arange(size)
        for index, number in zip(coordinate, parts, strict=True):
            ranges = dtensor._shard(ranges, index, number, 1)
            chunks = indices.chunk(number) if len(indices) else ()
            indices = chunks[index] if index < len(chunks) else indices[:0]
        assert [i for r in ranges for i in r] == indices.tolist()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_fsdp_over_tensor_parallelism_holds_the_tensor_parallel_shards(
    dp: int, tp: int, factor: int
) -> None:
    """A strided shard is the data-parallel share of the tensor-parallel shard."""
    size = dp * tp * factor
    for i, j in itertools.product(range(dp), range(tp)):
        held = dtensor._shard(dtensor._shard([range(size)], i, dp, tp), j, tp, 1)
        expected = torch.arange(size).chunk(tp)[j].chunk(dp)[i]
        assert [k for r in held for k in r] == expected.tolist()


@pytest.fixture
def meshes() -> Any:
    """Give a function that makes a mesh as one of its ranks sees it, without other processes."""
    dist = pytest.importorskip("torch.distributed")
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore
    device_mesh = pytest.importorskip("torch.distributed.device_mesh")

    def make(shape: tuple[int, ...], rank: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=store(), rank=rank, world_size=math.prod(shape))
        return device_mesh.init_device_mesh("cpu", shape)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_all_ranks_together_send_each_element_once(meshes: Any) -> None:
    """Uneven shards, empty ones and replicas: every element goes out, from one rank."""
    placement = pytest.importorskip("torch.distributed.tensor")
    full = torch.arange(5 * 3, dtype=torch.float32).reshape(5, 3)
    cases = [
        ((4,), [placement.Shard(0)]),
        ((4,), [placement.Shard(1)]),
        ((2, 3), [placement.Shard(0), placement.Shard(1)]),
        ((2, 2), [placement.Shard(0), placement.Shard(0)]),
        ((2, 3), [placement.Replicate(), placement.Shard(0)]),
        ((2,), [placement.Replicate()]),
    ]
    for shape, placements in cases:
        seen = torch.zeros_like(full)
        count = torch.zeros_like(full)
        for rank in range(math.prod(shape)):
            mesh = meshes(shape, rank)
            local = full
            for axis, p in enumerate(placements):
                if p.is_shard():
                    chunks = local.chunk(mesh.size(axis), p.dim)
                    index = mesh.get_coordinate()[axis]
                    local = chunks[index] if index < len(chunks) else local.narrow(p.dim, 0, 0)
            tensor = placement.DTensor.from_local(
                local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
            )
            for shard in dtensor.local_shards("w", tensor):
                assert shard.shape == (5, 3)
                values = bytes(shard.array.read(shard.region.relative_to(shard.region)))
                box = torch.frombuffer(bytearray(values), dtype=torch.float32)
                seen[shard.region.slices] = box.reshape(shard.region.sizes)
                count[shard.region.slices] += 1
        assert count.eq(1).all(), (shape, placements)
        assert seen.equal(full)


def test_partial_sums_are_refused(meshes: Any) -> None:
    """A tensor that still has to be reduced over ranks is no weight."""
    placement = pytest.importorskip("torch.distributed.tensor")
    errors = pytest.importorskip("weightsync.core.errors")
    mesh = meshes((2,), 0)
    tensor = placement.DTensor.from_local(
        torch.ones(3), mesh, [placement.Partial()], run_check=False
    )
    with pytest.raises(errors.UnsupportedError, match="redistribute"):
        list(dtensor.local_shards("w", tensor))
