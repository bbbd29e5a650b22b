"""The commit's inner part: live weights and staged bytes change places.

Exchanging instead of copying costs little more, for the pieces stay in the cache, and leaves the
old version in the arena: a commit that fails half-way is taken back without a second copy of the
model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from weightsync.apply.bits import PIECE_BYTES, as_array, bits, pieces, staged_bits
from weightsync.arena.arena import Bytes
from weightsync.core.regions import Region

T = TypeVar("T")


class Exchange:
    """A number of exchanges that can be taken back."""

    def __init__(self) -> None:
        """Start with nothing exchanged."""
        self._done: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self.nbytes = 0

    def swap(self, live: torch.Tensor, box: Region, staged: Bytes) -> None:
        """Exchange a box of a live tensor with staged bytes of its form.

        The live tensor keeps its storage, strides and identity. An exception leaves every piece
        either old or new, never torn, and `take_back` restores the old ones.

        Args:
            live: Any device, any strides.
            box: In elements of `live`.
            staged: uint8 of shape (*box.sizes, itemsize), writable.
        """
        for here, there in pieces(bits(live)[box.slices], staged_bits(staged)):
            self._swap(here, there)
            self._done.append((here, there))
            self.nbytes += here.numel() * here.element_size()

    def take_back(self) -> None:
        """Restore everything that was exchanged, newest first."""
        while self._done:
            self._swap(*self._done[-1])
            self._done.pop()
        self.nbytes = 0

    def _swap(self, here: torch.Tensor, there: torch.Tensor) -> None:
        # Memory from the allocator would be faulted in anew for each piece.
        nbytes = here.numel() * here.element_size()
        scratch = self._scratch if nbytes <= PIECE_BYTES else torch.empty(nbytes, dtype=torch.uint8)
        old = scratch[:nbytes].view(here.dtype).view(here.shape)
        if here.device.type == "cpu":
            # A piece is too small for torch's threads: to start and join them costs more.
            _exchange(as_array(here), there.numpy(), old.numpy(), np.copyto)
            return
        # Tensors made under inference mode can be written under it only, others as well.
        with torch.inference_mode():
            _exchange(here, there, old, torch.Tensor.copy_)


def _exchange(here: T, there: T, old: T, copy: Callable[[T, T], object]) -> None:
    copy(old, here)
    try:
        copy(here, there)
    except BaseException:
        copy(here, old)
        raise
    copy(there, old)
