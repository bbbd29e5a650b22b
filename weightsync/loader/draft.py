"""The draft's tensors, and what its checkpoint and the caller say about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import torch

from weightsync.core.errors import UnknownTensorError
from weightsync.loader.compare import has_content
from weightsync.loader.report import Tie
from weightsync.loader.slots import Slot, Slots


class Draft:
    """The slots of a draft, with the answers that decisions need.

    Args:
        slots: All slots of the draft that hold tensors.
        missing: Names that the checkpoint did not carry, so that their values mean nothing.
        exclude: Names, or patterns as in a shell, of either model that are not to be shared.
        prefer_view: Keep the draft's own objects and give them the verifier's storage.
        equal_only: Nothing is declared: what is absent stays absent.

    Raises:
        UnknownTensorError: a missing name is no name of the draft.
    """

    def __init__(
        self,
        slots: Slots,
        *,
        missing: Collection[str] = (),
        exclude: Collection[str] = (),
        prefer_view: bool = False,
        equal_only: bool = False,
    ) -> None:
        if unknown := sorted(set(missing) - slots.names):
            raise UnknownTensorError(
                f"the draft has no tensor named {unknown[0]!r}, said to be missing from its "
                "checkpoint: use the names of its state_dict()",
                subjects=unknown[:10],
            )
        self.slots = slots
        self._missing = frozenset(missing)
        self._exclude = tuple(exclude)
        self._prefer_view = prefer_view
        self._equal_only = equal_only

    def holders(self, slot: Slot) -> tuple[Slot, ...]:
        """Return all slots that hold the tensor of this one; only this one if it holds nothing."""
        tensor = slot.tensor
        return (slot,) if tensor is None else self.slots.holders(tensor)

    def is_placeholder(self, slot: Slot | None) -> bool:
        """Tell whether the slot's tensor was never loaded: under none of its names."""
        if slot is None or not has_content(slot.tensor):
            return True
        return all(holder.name in self._missing for holder in self.holders(slot))

    def borrows(self, slot: Slot | None) -> bool:
        """Tell whether the slot takes the verifier's tensor because it has no content."""
        return not self._equal_only and self.is_placeholder(slot)

    def excludes(self, names: Iterable[str]) -> bool:
        """Tell whether the caller switched sharing off for one of the names."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self._exclude)

    def tie(self, tensor: torch.Tensor | None, source: torch.Tensor) -> Tie:
        """Return how a tensor will be one with the verifier's."""
        if self._prefer_view and tensor is not None and not tensor.is_meta:
            return Tie.OBJECT if tensor is source else Tie.VIEW
        return Tie.OBJECT

    def without_content(self, given: Iterable[Slot]) -> list[str]:
        """Return the names of slots that have no content, but for those that are given one."""
        keys = {slot.key for slot in given}
        return [
            slot.name for slot in self.slots if slot.key not in keys and self.is_placeholder(slot)
        ]
