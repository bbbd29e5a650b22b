"""Shadows: weights in the form of the checkpoint, for modules whose kernels hold another form.

vLLM packs weights for its kernels after loading, on the CPU nearly all of them. What a module
holds is compared with the checkpoint: if it is not the checkpoint's bytes, whatever its shape, the
module gets a shadow in host memory; commits write that, and the module is made anew from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import nn

from weightsync.apply.bits import bits
from weightsync.apply.gather import as_source
from weightsync.core.regions import Region
from weightsync.engines.vllm.checkpoint import Checkpoint, TensorForm
from weightsync.engines.vllm.record import Record
from weightsync.engines.vllm.slots import Slot
from weightsync.layout.plan import Placement

SAMPLE_BYTES = 1 << 20
"""How much of each placement is compared."""


class Shadows:
    """The shadows of a worker's models, and which slots have none because they need none."""

    def __init__(self) -> None:
        """Start without."""
        self._shadows: dict[nn.Module, dict[str, torch.Tensor]] = {}
        self._known: set[Slot] = set()

    def tensor(self, slot: Slot) -> torch.Tensor:
        """Return what stands for a slot in the form of the checkpoint."""
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

    def add(self, slots: Mapping[str, Slot], record: Record, checkpoint: Checkpoint) -> None:
        """Make the shadows of a model that holds the checkpoint's values.

        What another model has brought already, because both have the same module, stays.
        """
        values = _Values(record, checkpoint)
        fresh = {name: slots[name] for name in record.forms if slots[name] not in self._known}
        packed = {
            slot.module for name, slot in fresh.items() if not values.held_by(name, slot.tensor)
        }
        for name, slot in fresh.items():
            self._known.add(slot)
            if slot.module in packed:
                self._shadows.setdefault(slot.module, {})[slot.leaf] = values.copy(name)


class _Values:
    """What a checkpoint puts into parameters."""

    def __init__(self, record: Record, checkpoint: Checkpoint) -> None:
        self._forms = record.forms
        self._checkpoint = checkpoint
        self._placements: dict[str, list[tuple[str, Placement]]] = {}
        for name, placements in record.placements.items():
            for placement in placements:
                self._placements.setdefault(placement.parameter, []).append((name, placement))

    def held_by(self, parameter: str, live: torch.Tensor) -> bool:
        """Tell whether a tensor is what the checkpoint puts there, as far as samples show."""
        form = self._forms[parameter]
        if TensorForm(live.dtype, tuple(live.shape)) != form:
            return False
        return all(
            torch.equal(as_source(live, part).cpu(), bits(self._read(name, part.source, form)))
            for name, placement in self._placements[parameter]
            for part in _samples(placement, live.element_size())
        )

    def copy(self, parameter: str) -> torch.Tensor:
        """Return it as a new tensor in host memory; padding is zero."""
        form = self._forms[parameter]
        made = torch.zeros(form.shape, dtype=form.dtype)
        for name, placement in self._placements[parameter]:
            as_source(made, placement).copy_(bits(self._read(name, placement.source, form)))
        return made

    def _read(self, name: str, region: Region, form: TensorForm) -> torch.Tensor:
        return self._checkpoint.read(name, region).to(form.dtype)


def _samples(placement: Placement, itemsize: int) -> Iterable[Placement]:
    """Return parts of a placement, from its beginning, middle and end, of bounded size."""
    source = placement.source
    nbytes = source.numel * itemsize
    if nbytes <= SAMPLE_BYTES:
        return [placement]
    axis = max(range(source.ndim), key=lambda d: source.sizes[d])
    rows = max(1, source.sizes[axis] * SAMPLE_BYTES // (3 * nbytes))
    last = source.sizes[axis] - rows
    return _slabs(placement, axis, rows, (0, last // 2, last))


def _slabs(
    placement: Placement, axis: int, rows: int, starts: Iterable[int]
) -> Iterator[Placement]:
    source = placement.source
    for start in starts:
        offsets, sizes = list(source.offsets), list(source.sizes)
        offsets[axis] += start
        sizes[axis] = rows
        slab = Region(tuple(offsets), tuple(sizes))
        yield Placement(slab, placement.parameter, placement.to_dest(slab), placement.axes)
