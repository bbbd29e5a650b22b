"""The commit's inner part: live weights and staged bytes change places.

Exchanging instead of copying costs little more, for the pieces stay in the cache, and leaves the
old version in the arena: a commit that fails half-way is taken back without a second copy of the
model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from weightsync.apply.bits import PIECE_BYTES, as_array, bits, pieces, plain_memory, staged_bits
from weightsync.arena.arena import Bytes
from weightsync.core.regions import Region

T = TypeVar("T")

_STEP_BYTES = 256 << 10
"""Largest piece of plain memory: what is held of it stays in a core's own cache."""

_WORTH_A_THREAD = 8 << 20
"""From this size on a box is exchanged in two halves at once: they reach what memory gives."""


class Exchange:
    """A number of exchanges that can be taken back."""

    def __init__(self) -> None:
        """Start with nothing exchanged."""
        self._undo: list[Callable[[], None]] = []
        # Memory from the allocator would be faulted in anew for each piece.
        self._scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self._steps = np.empty((2, _STEP_BYTES), np.uint8)
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
        here = live if live.shape == box.sizes else live[box.slices]
        if here.is_cpu and here.is_contiguous() and staged.flags.c_contiguous:
            self._swap_plain(plain_memory(here), staged.reshape(-1))
            return
        for pair in pieces(bits(here), staged_bits(staged)):
            self._swap(*pair)
            self._undo.append(partial(self._swap, *pair))
            self.nbytes += pair[0].numel() * pair[0].element_size()

    def take_back(self) -> None:
        """Restore everything that was exchanged, newest first."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self.nbytes = 0

    def _swap_plain(self, here: Bytes, there: Bytes) -> None:
        middle = here.size // 2
        if here.size < _WORTH_A_THREAD:
            self._swap_steps(here, there, self._steps[0])
        else:
            # numpy frees the interpreter while it copies.
            with ThreadPoolExecutor(1, "weightsync-exchange") as second:
                half = second.submit(
                    self._swap_steps, here[:middle], there[:middle], self._steps[1]
                )
                self._swap_steps(here[middle:], there[middle:], self._steps[0])
            half.result()
        self.nbytes += here.size

    def _swap_steps(self, here: Bytes, there: Bytes, scratch: Bytes) -> None:
        for start in range(0, here.size, _STEP_BYTES):
            one, two = here[start : start + _STEP_BYTES], there[start : start + _STEP_BYTES]
            old = scratch[: one.size]
            _exchange(one, two, old, np.copyto)
            self._undo.append(partial(_exchange, one, two, old, np.copyto))

    def _swap(self, here: torch.Tensor, there: torch.Tensor) -> None:
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
