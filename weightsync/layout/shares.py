"""Which names are one storage, within a target and over both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.core.types import Target, TensorKey

if TYPE_CHECKING:
    from collections.abc import Hashable

    from weightsync.layout.plan import Layout, TensorPlan


@dataclass(frozen=True, slots=True)
class ParameterKey:
    """A parameter's name within a worker."""

    target: Target
    name: str

    def __str__(self) -> str:
        """Return e.g. `draft:lm_head.weight`."""
        return f"{self.target}:{self.name}"


class Shares:
    """The storages of a worker and the names for each.

    Each storage is owned by the first parameter that lies on it, the verifier's before the
    draft's.
    """

    def __init__(self, layouts: Mapping[Target, Layout]) -> None:
        """Find the names that are one storage."""
        self._layouts = layouts
        self._members: dict[Hashable, list[ParameterKey]] = {}
        for target in sorted(layouts, key=lambda t: t.value):
            for spec in layouts[target].parameters.values():
                self._members.setdefault(spec.storage, []).append(ParameterKey(target, spec.name))
        self._owner = {key: keys[0] for keys in self._members.values() for key in keys}
        self._groups = self._tensor_groups()

    def owner(self, key: ParameterKey) -> ParameterKey:
        """Return the parameter that stands for the storage of `key`."""
        return self._owner[key]

    def first(self, key: ParameterKey, target: Target) -> ParameterKey:
        """Return the first parameter of a target on the storage of `key`."""
        return next(k for k in self.members(key) if k.target is target)

    def members(self, key: ParameterKey) -> tuple[ParameterKey, ...]:
        """Return all parameters on the storage of `key`, itself included."""
        spec = self._layouts[key.target].parameters[key.name]
        return tuple(self._members[spec.storage])

    def groups(self) -> list[tuple[ParameterKey, ...]]:
        """Return the storages with more than one name, each with all its names."""
        return [tuple(keys) for keys in self._members.values() if len(keys) > 1]

    def belongs_to_verifier(self, key: TensorKey) -> bool:
        """Tell whether a draft's tensor lies, in part or whole, on storage of the verifier."""
        plan = self._layouts[key.target].tensors[key.name]
        return key.target is Target.DRAFT and any(
            self._owner[ParameterKey(key.target, p.parameter)].target is Target.VERIFIER
            for p in plan.placements
        )

    def nbytes(self, target: Target) -> int:
        """Return the bytes of the distinct storages of a target."""
        specs = {s.storage: s for s in self._layouts[target].parameters.values()}
        return sum(spec.nbytes for spec in specs.values())

    def group(self, key: TensorKey) -> str:
        """Return the share group of a tensor: the first name of its elements; empty if alone."""
        return self._groups.get(key, "")

    def _tensor_groups(self) -> dict[TensorKey, str]:
        same: dict[Hashable, list[TensorKey]] = {}
        for target in sorted(self._layouts, key=lambda t: t.value):
            for plan in self._layouts[target].tensors.values():
                same.setdefault(self._elements(target, plan), []).append(
                    TensorKey(target, plan.name)
                )
        return {key: str(keys[0]) for keys in same.values() if len(keys) > 1 for key in keys}

    def _elements(self, target: Target, plan: TensorPlan) -> Hashable:
        places = frozenset(
            (p.source, self._owner[ParameterKey(target, p.parameter)], p.dest, p.axes)
            for p in plan.placements
        )
        # A tensor of which this worker holds nothing shares nothing.
        return (plan.shape, places) if places else (target, plan.name)
