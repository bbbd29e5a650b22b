"""The layout: where each element of each checkpoint tensor lies in the engine's parameters."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from weightsync.core.dtypes import DType
from weightsync.core.regions import Region


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the engine holds under one name: a parameter or a persistent buffer.

    Attributes:
        name: The engine's name.
        dtype: Element type.
        shape: Shape on this worker.
        storage: Identity of the memory behind it. Parameters of any target with equal values are
            one storage.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    storage: Hashable

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Placement:
    """A box of a tensor that lies as a box in a parameter, its axes perhaps in another order.

    Attributes:
        source: The box, in elements of the tensor.
        parameter: Name of the engine's parameter.
        dest: The box, in elements of the parameter.
        axes: For each dimension of the parameter the dimension of the tensor that runs along it,
            or None where the box is one element thick. Dimensions of the tensor that do not occur
            are one element thick in `source`.
    """

    source: Region
    parameter: str
    dest: Region
    axes: tuple[int | None, ...]

    def __post_init__(self) -> None:
        """Check that the two boxes hold the same elements."""
        used = [a for a in self.axes if a is not None]
        fits = (
            len(self.axes) == self.dest.ndim
            and len(set(used)) == len(used)
            and all(
                size == (1 if a is None else self.source.sizes[a])
                for a, size in zip(self.axes, self.dest.sizes, strict=True)
            )
            and all(self.source.sizes[d] == 1 for d in range(self.source.ndim) if d not in used)
        )
        if not fits:
            raise ValueError(f"placement {self} does not map its source onto its dest")

    @classmethod
    def identity(cls, parameter: str, shape: tuple[int, ...]) -> Placement:
        """Return the placement of a tensor that is a whole parameter."""
        whole = Region.whole(shape)
        return cls(whole, parameter, whole, tuple(range(len(shape))))

    def to_dest(self, box: Region) -> Region:
        """Map a box inside `source`, which must not be empty, to the parameter."""
        local = box.relative_to(self.source)
        offsets = tuple(
            start + (0 if a is None else local.offsets[a])
            for start, a in zip(self.dest.offsets, self.axes, strict=True)
        )
        sizes = tuple(1 if a is None else local.sizes[a] for a in self.axes)
        return Region(offsets, sizes)

    def to_source(self, box: Region) -> Region:
        """Map a box inside `dest`, which must not be empty, to the tensor."""
        offsets = list(self.source.offsets)
        sizes = [1] * self.source.ndim
        for d, a in enumerate(self.axes):
            if a is not None:
                offsets[a] += box.offsets[d] - self.dest.offsets[d]
                sizes[a] = box.sizes[d]
        return Region(tuple(offsets), tuple(sizes))

    def after(self, first: Placement) -> Placement:
        """Return the placement of both, one after the other.

        Args:
            first: Fills the tensor that this placement copies from, at least where it does.
        """
        axes = tuple(None if a is None else first.axes[a] for a in self.axes)
        return Placement(first.to_source(self.source), self.parameter, self.dest, axes)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A checkpoint tensor and where it lies on this worker.

    Attributes:
        name: Checkpoint name.
        dtype: Element type of the live storage.
        shape: Global shape.
        placements: Where its elements lie; their sources may be less than the tensor (a shard)
            and may repeat (a copy in two parameters).
        composite: True if other tensors of the layout reach the same elements (a fused parameter
            listed beside its parts).
        reloaded: True if its parameter is a copy of the tensor as it was sent, from which the
            engine loads its modules once more: it computes with the elements while it loads.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    composite: bool = False
    reloaded: bool = False

    @property
    def is_parameter(self) -> bool:
        """Tell whether it lies in one parameter as it is, though perhaps in a part of it."""
        if len(self.placements) != 1:
            return False
        placement = self.placements[0]
        return (
            placement.source.sizes == self.shape
            and placement.dest == placement.source
            and placement.axes == tuple(range(len(self.shape)))
        )

    @property
    def regions(self) -> tuple[Region, ...]:
        """The distinct regions of the tensor that the worker holds."""
        return tuple(dict.fromkeys(p.source for p in self.placements))


@dataclass(frozen=True)
class Layout:
    """All tensors and all parameters of one target.

    Attributes:
        parameters: By engine name.
        tensors: By checkpoint name, in the order of the engine.
    """

    parameters: Mapping[str, ParameterSpec]
    tensors: Mapping[str, TensorPlan]
    _needed: dict[str, tuple[Region, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that placements lie inside their parameters."""
        needed: dict[str, dict[Region, None]] = {}
        for plan in self.tensors.values():
            for placement in plan.placements:
                spec = self.parameters[placement.parameter]
                if not placement.dest.fits(spec.shape) or not placement.source.fits(plan.shape):
                    raise ValueError(f"tensor {plan.name!r}: {placement} leaves {spec}")
                if plan.dtype is not spec.dtype:
                    raise ValueError(f"tensor {plan.name!r} is {plan.dtype}, {spec} is not")
                if not plan.composite:
                    needed.setdefault(spec.name, {})[placement.dest] = None
        object.__setattr__(self, "_needed", {name: tuple(r) for name, r in needed.items()})

    @classmethod
    def of(cls, parameters: Iterable[ParameterSpec], tensors: Iterable[TensorPlan]) -> Layout:
        """Make a layout from sequences."""
        return cls({p.name: p for p in parameters}, {t.name: t for t in tensors})

    @classmethod
    def identity(cls, parameters: Iterable[ParameterSpec]) -> Layout:
        """Return the layout of a model whose checkpoint names are its parameter names."""
        specs = list(parameters)
        return cls.of(
            specs,
            (
                TensorPlan(p.name, p.dtype, p.shape, (Placement.identity(p.name, p.shape),))
                for p in specs
            ),
        )

    def needed(self, parameter: str) -> tuple[Region, ...]:
        """Return the boxes of a parameter that tensors reach; padding is in none of them."""
        return self._needed.get(parameter, ())
