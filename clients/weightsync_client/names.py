"""From a sender's names to the workers': wrapper prefixes, PEFT parts, renaming rules."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from weightsync.core.errors import InvalidRequestError, UnknownTensorError
from weightsync.core.names import unknown_tensor
from weightsync.core.types import Target

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PEFT_ROOT = ("base_model", "model")
_PEFT_BASE = "base_layer"
_PEFT_SAVED = "modules_to_save"
_PEFT_FROZEN = "original_module"
_PEFT_ADAPTER = "lora_"
_MAX_REMOVABLE = 12


@dataclass(frozen=True)
class NameMapping:
    """How the names of a source become names of the workers.

    A name that a worker has is taken as it is. Otherwise the parts that wrappers add are removed,
    as few as make it fit, in any order and at any depth, by whole path parts: `module`,
    `_orig_mod`, `_fsdp_wrapped_module`, `_checkpoint_wrapped_module`, and PEFT's
    `base_model.model`, `base_layer` and `modules_to_save.ADAPTER`.

    Attributes:
        rules: Pairs of an old and a new prefix, in whole path parts; the first that fits is
            applied before a name is looked up. An empty prefix stands for every name.
        adapter: Of PEFT's fully trained copies (`modules_to_save`), the one that is sent. Other
            copies, and the frozen original, are left out.
    """

    rules: tuple[tuple[str, str], ...] = ()
    adapter: str = "default"

    def resolve(self, name: str, target: Target, known: Collection[str]) -> str | None:
        """Return the worker's name, or None for a copy that is not meant to be sent.

        Args:
            name: The sender's name.
            target: The model, for the error.
            known: The names that the workers have.

        Raises:
            UnknownTensorError: nothing fits; it names the closest one.
            InvalidRequestError: two ways to read the name fit two tensors.
        """
        found: set[str] = set()
        removed = 0
        for count, candidate in self._candidates(name):
            if found and count > removed:
                break
            mapped = self.rename(candidate)
            if mapped in known:
                found.add(mapped)
                removed = count
        if len(found) > 1:
            raise InvalidRequestError(
                f"{name!r} could be any of {sorted(found)}; give a rule that says which",
                subjects=[name],
            )
        if found:
            return found.pop()
        parts = name.split(".")
        if self._left_out(parts):
            return None
        if any(part.startswith(_PEFT_ADAPTER) for part in parts):
            raise UnknownTensorError(
                f"{name!r} is an adapter's own weight, which the {target} does not have: merge the "
                f"adapter before the push, or list it in ignore_names, e.g. '*.lora_*'",
                subjects=[name],
            )
        raise unknown_tensor(target, self.rename(name), known)

    def rename(self, name: str) -> str:
        """Apply the first rule whose old prefix the name has."""
        for old, new in self.rules:
            if not old:
                return f"{new}.{name}" if new else name
            if name == old or name.startswith(f"{old}."):
                rest = name[len(old) + 1 :]
                return ".".join(part for part in (new, rest) if part)
        return name

    def _left_out(self, parts: list[str]) -> bool:
        """Tell whether the name is a copy beside the one that is sent."""
        saved = [b for a, b in itertools.pairwise(parts) if a == _PEFT_SAVED]
        return _PEFT_FROZEN in parts or any(adapter != self.adapter for adapter in saved)

    def _candidates(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield how many units were removed, and what is left; fewest first."""
        yield 0, name
        parts = name.split(".")
        if self._left_out(parts):
            return
        units = list(self._units(parts))[:_MAX_REMOVABLE]
        for count in range(1, len(units) + 1):
            for chosen in itertools.combinations(units, count):
                gone = {index for unit in chosen for index in unit}
                left = [part for index, part in enumerate(parts) if index not in gone]
                if left and len(gone) == sum(map(len, chosen)):
                    yield count, ".".join(left)

    def _units(self, parts: list[str]) -> Iterator[range]:
        """Yield the positions of what wrappers may have added."""
        for index, part in enumerate(parts):
            if part in _WRAPPERS or part == _PEFT_BASE:
                yield range(index, index + 1)
            if tuple(parts[index : index + 2]) == _PEFT_ROOT:
                yield range(index, index + 2)
            if parts[index : index + 2] == [_PEFT_SAVED, self.adapter]:
                yield range(index, index + 2)
