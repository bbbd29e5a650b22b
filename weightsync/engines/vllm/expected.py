"""What loading has put into the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from weightsync.apply.bits import bits
from weightsync.apply.gather import as_source
from weightsync.core.regions import Region
from weightsync.engines.vllm.checkpoint import Checkpoint, TensorForm
from weightsync.engines.vllm.record import Record
from weightsync.engines.vllm.reload import made_up_again
from weightsync.engines.vllm.slots import Slot
from weightsync.layout.plan import Placement

SAMPLE_BYTES = 1 << 20
"""How much of each placement is compared."""


class Expected(Protocol):
    """What loading has put into one parameter."""

    def held_by(self, live: torch.Tensor) -> bool:
        """Tell whether a tensor holds it in the same form, as far as samples show."""

    def copy(self) -> torch.Tensor:
        """Return it as a new tensor in host memory; padding is zero."""


def expected(
    record: Record, slots: Mapping[str, Slot], checkpoint: Checkpoint
) -> dict[Slot, Expected]:
    """Return what has been put into each parameter that a record names."""
    if not checkpoint.loaded:
        return {slots[name]: MadeUp(slots[name], form) for name, form in record.forms.items()}
    placements: dict[str, list[tuple[str, Placement]]] = {name: [] for name in record.forms}
    for name, places in record.placements.items():
        for placement in places:
            placements[placement.parameter].append((name, placement))
    return {
        slots[name]: _Placed(form, placements[name], checkpoint)
        for name, form in record.forms.items()
    }


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is at hand."""

    tensor: torch.Tensor

    def held_by(self, live: torch.Tensor) -> bool:
        """Compare all of it."""
        return form_of(live) == form_of(self.tensor) and torch.equal(
            bits(live).cpu(), bits(self.tensor).cpu()
        )

    def copy(self) -> torch.Tensor:
        """Return it in host memory."""
        return self.tensor.to("cpu", copy=True)


@dataclass(frozen=True, slots=True)
class MadeUp:
    """The values that vLLM makes up for a parameter: the same ones each time."""

    slot: Slot
    form: TensorForm

    def held_by(self, live: torch.Tensor) -> bool:
        """Compare all of it; integers, which vLLM leaves as the memory was, by form only."""
        if form_of(live) != self.form:
            return False
        return not live.is_floating_point() or Whole(self._make()).held_by(live)

    def copy(self) -> torch.Tensor:
        """Make it up again."""
        return self._make().cpu()

    def _make(self) -> torch.Tensor:
        return made_up_again(self.slot.module, self.slot.leaf)


@dataclass(frozen=True, slots=True)
class _Placed:
    """What is copied out of a checkpoint."""

    form: TensorForm
    placements: list[tuple[str, Placement]]
    checkpoint: Checkpoint

    def held_by(self, live: torch.Tensor) -> bool:
        if form_of(live) != self.form:
            return False
        return all(
            torch.equal(as_source(live, part).cpu(), bits(self._read(name, part.source)))
            for name, placement in self.placements
            for part in _samples(placement, live.element_size())
        )

    def copy(self) -> torch.Tensor:
        made = torch.zeros(self.form.shape, dtype=self.form.dtype)
        for name, placement in self.placements:
            as_source(made, placement).copy_(bits(self._read(name, placement.source)))
        return made

    def _read(self, name: str, region: Region) -> torch.Tensor:
        return self.checkpoint.read(name, region).to(self.form.dtype)


def form_of(tensor: torch.Tensor) -> TensorForm:
    """Return type and shape of a tensor."""
    return TensorForm(tensor.dtype, tuple(tensor.shape))


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
