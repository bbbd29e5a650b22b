"""The boxes of a tensor that this rank holds of a `DTensor`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.distributed.tensor import DTensor

from weightsync.core.errors import UnsupportedError
from weightsync.core.regions import Region
from weightsync_client.shards import Shard
from weightsync_client.sources.torch_array import TorchArray

Ranges = list[range]
"""Global indices along one dimension, in the order in which the local tensor holds them."""


def local_shards(name: str, tensor: DTensor) -> Iterator[Shard]:
    """Yield this rank's part of a sharded tensor; of replicas, the first rank's only.

    Raises:
        UnsupportedError: the values are partial sums, or a placement is unknown.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return  # This rank is no part of the mesh.
    held: list[Ranges] = [[range(size)] for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        index, parts = coordinate[axis], tensor.device_mesh.size(axis)
        if placement.is_replicate():
            if index:
                return
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            raise UnsupportedError(
                f"tensor {name!r} is placed as {placement}: redistribute it to shards or replicas "
                f"before the push",
                subjects=[name],
            )
        held[dim] = _shard(held[dim], index, parts, getattr(placement, "split_factor", 1))
    yield from _boxes(name, tensor, held)


def _boxes(name: str, tensor: DTensor, held: list[Ranges]) -> Iterator[Shard]:
    """Yield each box of the local tensor that is one box of the global one as well."""
    local = tensor.to_local()
    located: list[list[tuple[int, range]]] = []
    for ranges in held:
        starts = itertools.accumulate((len(r) for r in ranges), initial=0)
        located.append([(start, r) for start, r in zip(starts, ranges, strict=False) if r])
    for combination in itertools.product(*located):
        region = Region(
            tuple(r.start for _, r in combination), tuple(len(r) for _, r in combination)
        )
        here = Region(tuple(start for start, _ in combination), region.sizes)
        yield Shard(name, TorchArray(local[here.slices], name), tuple(tensor.shape), region)


def _shard(ranges: Ranges, index: int, parts: int, split: int) -> Ranges:
    """Return what one of `parts` ranks holds of indices that are sharded once more.

    With `split` above 1 (FSDP over tensor parallelism) the indices are cut into that many pieces
    first, and the rank holds its share of each piece.
    """
    pieces = [_chunk(ranges, i, split) for i in range(split)] if split > 1 else [ranges]
    return [r for piece in pieces for r in _chunk(piece, index, parts)]


def _chunk(ranges: Ranges, index: int, parts: int) -> Ranges:
    """Return one of `parts` equal runs of indices; the last ones may be short or empty."""
    total = sum(map(len, ranges))
    size = -(-total // parts)
    begin, end = min(total, index * size), min(total, (index + 1) * size)
    found: Ranges = []
    for r in ranges:
        part = r[max(0, begin) : max(0, end)]
        if part:
            found.append(part)
        begin, end = begin - len(r), end - len(r)
    return found
