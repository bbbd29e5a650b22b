"""Where the parameters of a session's targets are staged: each storage once, under one name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from weightsync.core.coverage import Coverage
from weightsync.core.regions import Region
from weightsync.core.types import Target, TensorKey
from weightsync.layout.plan import Layout, ParameterSpec
from weightsync.layout.shares import ParameterKey, Shares


class Homes:
    """The layouts of a session's targets, and which storage stands for which parameter.

    Attributes:
        layouts: Of the session's targets, the verifier's first.
        shares: Of all targets of the worker.
    """

    def __init__(
        self, targets: Collection[Target], layouts: Mapping[Target, Layout], shares: Shares
    ) -> None:
        """Take the session's targets, and the layouts of all targets."""
        self.layouts = {t: layouts[t] for t in sorted(targets, key=lambda t: t.value)}
        self.shares = shares

    def of(self, key: ParameterKey) -> ParameterKey:
        """Return the key under which a parameter's storage is staged."""
        owner = self.shares.owner(key)
        if owner.target in self.layouts:
            return owner
        return self.shares.first(owner, key.target)

    def spec(self, key: ParameterKey) -> ParameterSpec:
        """Return what the engine holds under a name."""
        return self.layouts[key.target].parameters[key.name]

    def is_foreign(self, key: TensorKey) -> bool:
        """Tell whether a tensor lies on storage of the verifier, which the session leaves alone."""
        return Target.VERIFIER not in self.layouts and self.shares.belongs_to_verifier(key)

    def is_foreign_storage(self, home: ParameterKey) -> bool:
        """Tell the same of a storage."""
        return self.shares.owner(home).target not in self.layouts

    def boxes(self, *, foreign: bool) -> dict[ParameterKey, tuple[Region, ...]]:
        """Return where tensors lie: disjoint boxes of each storage.

        Args:
            foreign: With storage of the verifier that a draft's session may not leave alone.
        """
        found: dict[ParameterKey, Coverage] = {}
        for target, layout in self.layouts.items():
            for name in layout.parameters:
                home = self.of(ParameterKey(target, name))
                if foreign or not self.is_foreign_storage(home):
                    union = found.setdefault(home, Coverage())
                    for box in layout.needed(name):
                        union.add(box)
        return {key: union.boxes for key, union in found.items() if union}

    def nbytes(self, boxes: Mapping[ParameterKey, Iterable[Region]]) -> int:
        """Return how many bytes boxes of storages have."""
        return sum(
            sum(box.numel for box in some) * self.spec(key).dtype.itemsize
            for key, some in boxes.items()
        )
