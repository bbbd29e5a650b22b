"""Shadows: weights in the form of the checkpoint, for modules whose kernels hold another form.

vLLM packs weights for its kernels after loading, on the CPU nearly all of them. What a module
holds is compared with the checkpoint: if it is not the checkpoint's bytes, whatever its shape, the
module gets a shadow in host memory; commits write that, and the module is made anew from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from weightsync.engines.vllm.expected import Expected
from weightsync.engines.vllm.slots import Sent, Slot


class Shadows:
    """The shadows of a worker's models, and which slots have none because they need none."""

    def __init__(self) -> None:
        """Start without."""
        self._shadows: dict[nn.Module, dict[str, torch.Tensor]] = {}
        self._known: set[Slot] = set()

    def tensor(self, slot: Slot | Sent) -> torch.Tensor:
        """Return what stands for a slot in the form of the checkpoint."""
        if isinstance(slot, Sent):
            return slot.tensor
        shadow = self.of(slot.module).get(slot.leaf)
        return slot.tensor if shadow is None else shadow

    def of(self, module: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the shadows of a module's own tensors, by their names in it."""
        return self._shadows.get(module, {})

    @property
    def known(self) -> frozenset[Slot]:
        """The slots that checkpoints fill."""
        return frozenset(self._known)

    @property
    def modules(self) -> Collection[nn.Module]:
        """The modules that have shadows."""
        return self._shadows.keys()

    def add(self, expected: Mapping[Slot, Expected]) -> None:
        """Make the shadows of a model that holds what is expected, in whatever form.

        What another model has brought already, because both have the same module, stays.
        """
        fresh = {slot: value for slot, value in expected.items() if slot not in self._known}
        packed = {slot.module for slot, value in fresh.items() if not value.held_by(slot.tensor)}
        for slot, value in fresh.items():
            self._known.add(slot)
            if slot.module in packed and slot.is_registered:
                self._shadows.setdefault(slot.module, {})[slot.leaf] = value.copy()
