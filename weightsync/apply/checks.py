"""What is checked of staged bytes before a commit, and of live tensors after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.apply.bits import bits, pieces, staged_bits, storage_identity
from weightsync.apply.dtypes import to_torch
from weightsync.arena.arena import Bytes
from weightsync.core.dtypes import DType, Kind
from weightsync.core.regions import Region
from weightsync.core.types import Target
from weightsync.layout.shares import ParameterKey

Live = Mapping[Target, Mapping[str, torch.Tensor]]
"""The live tensors of each target, by engine name."""


def all_finite(memory: Bytes, dtype: DType) -> bool:
    """Tell whether staged elements, uint8 of shape (*sizes, itemsize), have no NaN or infinity."""
    if dtype.kind not in (Kind.FLOAT, Kind.COMPLEX):
        return True
    staged = staged_bits(memory)
    for piece, _ in pieces(staged, staged):
        values = piece.contiguous().view(to_torch(dtype))
        # The 8-bit kinds have no isfinite of their own.
        if dtype.itemsize == 1:
            values = values.to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            return False
    return True


def equals_live(live: torch.Tensor, box: Region, staged: Bytes) -> bool:
    """Tell whether a box of a live tensor holds the same bits as staged bytes of its form."""
    return all(
        torch.equal(here.cpu(), there)
        for here, there in pieces(bits(live)[box.slices], staged_bits(staged))
    )


def broken_groups(
    live: Live, groups: Sequence[tuple[ParameterKey, ...]]
) -> list[tuple[ParameterKey, ...]]:
    """Return the groups whose members are not one storage any more."""
    return [
        group
        for group in groups
        if len({storage_identity(live[key.target][key.name]) for key in group}) > 1
    ]
