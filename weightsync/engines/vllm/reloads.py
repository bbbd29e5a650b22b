"""Layers that the model itself must load, since it computes with elements while it loads them.

The service keeps the tensors that reach such layers as they are sent. After a commit has written
some of them, the model loads the layers once more from all of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weightsync.core.errors import UnsupportedError
from weightsync.core.regions import Region
from weightsync.engines.vllm.checkpoint import Checkpoint
from weightsync.engines.vllm.expected import Expected, MadeUp, Whole, form_of
from weightsync.engines.vllm.record import Group
from weightsync.engines.vllm.reload import load_again
from weightsync.engines.vllm.shadow import Shadows
from weightsync.engines.vllm.slots import Sent, Slot


class Reload:
    """Modules that are loaded together.

    Attributes:
        sent: What they are loaded from, by the checkpoint's name.
        slots: What loading them writes, without that which belongs to another model.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - an nn.Module with `load_weights`
        group: Group,
        sent: Mapping[str, Sent],
        shadows: Shadows,
    ) -> None:
        """Take what `reloads` has found out."""
        self._model = model
        self._modules = group.modules
        self._shadows = shadows
        self.sent = sent
        self.slots: frozenset[Slot] = frozenset()

    def run(self) -> None:
        """Load the modules again; what is derived from them is not made anew."""
        for slot, tensor in self._load().items():
            if slot in self.slots:
                self._shadows.tensor(slot).copy_(tensor)

    def find(self, *, made_up: bool) -> None:
        """Find out what loading writes, and make the shadows that it needs.

        Args:
            made_up: The model holds values that vLLM has made up, not those that were sent.

        Raises:
            UnsupportedError: the model can't load these modules alone.
        """
        try:
            loaded = self._load()
        except Exception as error:
            raise UnsupportedError(
                f"{type(self._model).__name__} computes with {', '.join(self.sent)} while it loads "
                f"and can't load these tensors alone ({error}); they can't be updated"
            ) from error
        self.slots = frozenset(loaded.keys() - self._shadows.known)
        values: dict[Slot, Expected] = {
            slot: MadeUp(slot, form_of(loaded[slot])) if made_up else Whole(loaded[slot])
            for slot in self.slots
        }
        self._shadows.add(values)

    def _load(self) -> dict[Slot, torch.Tensor]:
        # Clones, as loaders compute in place, too.
        weights = ((name, sent.tensor.clone()) for name, sent in self.sent.items())
        return load_again(self._model, self._modules, weights)


def reloads(
    model: nn.Module, groups: list[Group], checkpoint: Checkpoint, shadows: Shadows
) -> list[Reload]:
    """Prepare what a model must load itself.

    Call it under `set_current_vllm_config`.

    Args:
        model: Loaded.
        groups: Of its record.
        checkpoint: Which it was loaded from.
        shadows: Get those of the modules that hold another form than they are loaded in.

    Raises:
        UnsupportedError: a group can't be loaded alone.
    """
    found = []
    for group in groups:
        sent = {name: Sent(_value(checkpoint, name)) for name in group.tensors}
        found.append(Reload(model, group, sent, shadows))
        found[-1].find(made_up=not checkpoint.loaded)
    return found


def _value(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    form = checkpoint.form(name)
    if not checkpoint.loaded:
        return torch.zeros(form.shape, dtype=form.dtype)
    return checkpoint.read(name, Region.whole(form.shape)).clone()


def layers(found: list[Reload], slots: Mapping[str, Slot]) -> Iterator[str]:
    """Yield the names of the modules that are loaded again."""
    modules = {slot.module for reload in found for slot in reload.slots}
    yield from dict.fromkeys(n.rpartition(".")[0] for n, s in slots.items() if s.module in modules)
