"""Freeing the memory of parameters, and bringing it back, without replacing any tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weightsync.core.errors import UnsupportedError


class SleepingMemory:
    """The storages of some modules' parameters while they are freed.

    Tensors, views and ties stay what they are, since only the storage below them changes size;
    addresses differ after waking up.
    """

    def __init__(self, modules: Iterable[nn.Module], *, keep: bool) -> None:
        """Free the parameters; buffers stay.

        Args:
            modules: Models.
            keep: Whether to copy the parameters to host memory first.

        Raises:
            UnsupportedError: memory that torch did not allocate; nothing was freed.
        """
        modules = list(modules)
        kept = {
            buffer.untyped_storage().data_ptr() for module in modules for buffer in module.buffers()
        }
        storages: dict[int, torch.UntypedStorage] = {}
        for module in modules:
            for name, parameter in module.named_parameters():
                storage = parameter.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in kept:
                    if not storage.resizable():
                        raise UnsupportedError(
                            f"the memory of {name!r} is not torch's own and can't be freed; "
                            "clone the parameter before serving it"
                        )
                    storages[storage.data_ptr()] = storage
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._copies = [_bytes(s).to("cpu", copy=True) for s, _ in self._storages] if keep else None
        for storage, _ in self._storages:
            storage.resize_(0)

    def forget(self) -> None:
        """Drop the copies: what is restored has undefined contents."""
        self._copies = None

    def restore(self) -> None:
        """Allocate the memory again, and copy back what was kept."""
        for storage, size in self._storages:
            storage.resize_(size)
        for (storage, _), copy in zip(self._storages, self._copies or (), strict=False):
            _bytes(storage).copy_(copy)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
