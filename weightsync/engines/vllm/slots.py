"""The places in a model where its tensors hang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter, buffer or other tensor of a module, whatever name or model leads to it."""

    module: nn.Module
    leaf: str

    @property
    def tensor(self) -> torch.Tensor:
        """What hangs there now."""
        found: torch.Tensor = getattr(self.module, self.leaf)
        return found

    @property
    def is_registered(self) -> bool:
        """Tell whether it is a parameter or a buffer, and no plain attribute."""
        return self.leaf in self.module._parameters or self.leaf in self.module._buffers  # noqa: SLF001


@dataclass(frozen=True, eq=False, slots=True)
class Sent:
    """A tensor of a checkpoint as it is sent: it hangs in no module, but some are loaded from it.

    Attributes:
        tensor: In host memory, of the checkpoint's type and shape.
    """

    tensor: torch.Tensor


def named_slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Yield all names of all parameters and buffers of a model."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        held = {**module._parameters, **module._buffers}  # noqa: SLF001 - its own ones only
        for leaf, tensor in held.items():
            if tensor is not None:
                yield f"{prefix}.{leaf}" if prefix else leaf, Slot(module, leaf)
