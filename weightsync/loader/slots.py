"""Slots: the attributes of a model's modules that refer to tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weightsync.loader.compare import has_content, view_key


@dataclass(frozen=True, slots=True)
class Slot:
    """One attribute of one module, which holds a tensor, a module, or nothing.

    Attributes:
        name: Dotted path from the model.
        module: The module whose attribute it is.
        attribute: Name of the attribute.
        saved: Whether a checkpoint carries it: a parameter or a persistent buffer.
    """

    name: str
    module: nn.Module
    attribute: str
    saved: bool = True

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor it holds now."""
        value = getattr(self.module, self.attribute, None)
        return value if isinstance(value, torch.Tensor) else None

    @property
    def key(self) -> tuple[int, str]:
        """What is equal for two names of one slot."""
        return id(self.module), self.attribute

    def put(self, value: torch.Tensor | nn.Module) -> None:
        """Make it hold another tensor, or a module; a slot of a plain tensor remains one."""
        if isinstance(value, nn.Parameter) and not isinstance(self.tensor, nn.Parameter | None):
            value = value.detach()
        setattr(self.module, self.attribute, value)


class Slots:
    """All slots of a model that hold tensors, and which of them hold the same one."""

    def __init__(self, model: nn.Module) -> None:
        # With duplicates: a module under two paths has two names, and both must be found.
        self._slots = tuple(
            slot
            for path, module in model.named_modules(remove_duplicate=False)
            for slot in slots_of(module, path)
        )
        self._by_view: dict[Hashable, list[Slot]] = defaultdict(list)
        for slot, tensor in self.items():
            self._by_view[view_key(tensor)].append(slot)
        self.names = frozenset(slot.name for slot in self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def items(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Return each slot with the tensor it holds now."""
        for slot in self._slots:
            if (tensor := slot.tensor) is not None:
                yield slot, tensor

    def holders(self, tensor: torch.Tensor) -> tuple[Slot, ...]:
        """Return all slots that held this view of this storage when the model was walked."""
        return tuple(self._by_view[view_key(tensor)])

    def without_content(self) -> list[str]:
        """Return the names of tensors on the meta device."""
        return [slot.name for slot, tensor in self.items() if not has_content(tensor)]


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[Hashable, int]:
    """Return the bytes of each distinct storage behind the tensors, by its address."""
    sizes: dict[Hashable, int] = {}
    for tensor in tensors:
        if has_content(tensor) and view_key(tensor) != id(tensor):
            storage = tensor.untyped_storage()
            sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sizes


def slots_of(module: nn.Module, path: str = "") -> Iterator[Slot]:
    """Return the slots of one module itself: parameters, buffers, and plain attributes."""
    prefix = f"{path}." if path else ""
    for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        yield Slot(prefix + name, module, name)
    transient = module._non_persistent_buffers_set  # noqa: SLF001 - there is no public way
    for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
        yield Slot(prefix + name, module, name, saved=name not in transient)
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield Slot(prefix + name, module, name, saved=False)
