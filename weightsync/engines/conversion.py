"""The checkpoint names of a Hugging Face model, from transformers' own conversion.

New versions of transformers hold fused or stacked parameters where checkpoints have many tensors.
What lies where is not told by their API, but it shows: the way back to a checkpoint is run on
tensors without memory, and the strides of its results say which elements they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from weightsync.apply.dtypes import to_torch
from weightsync.core.regions import Region
from weightsync.layout.plan import Layout, ParameterSpec, Placement, TensorPlan


def checkpoint_layout(model: PreTrainedModel, parameters: Sequence[ParameterSpec]) -> Layout:
    """Return the layout whose tensors are those of the folder that `save_pretrained` writes.

    A parameter that is another tensor there, or several, is listed under its own name, too, as a
    composite. One whose elements are reordered in a way that boxes can't express is listed under
    its own name only.
    """
    hollow = {
        p.name: torch.empty(p.shape, dtype=to_torch(p.dtype), device="meta") for p in parameters
    }
    with _Views() as views:
        tensors = revert_weight_conversion(model, dict(hollow))
    origins = {_key(tensor): name for name, tensor in hollow.items()}
    specs = {p.name: p for p in parameters}
    plans: dict[str, TensorPlan] = {}
    for name, tensor in tensors.items():
        places = views.placements(tensor, origins, specs)
        dtypes = {specs[place.parameter].dtype for place in places}
        known = sum(place.source.numel for place in places) == tensor.numel()
        if known and len(dtypes) == 1:
            plans[name] = TensorPlan(name, dtypes.pop(), tuple(tensor.shape), tuple(places))
    plans = _whole(plans, specs)
    reached = {place.parameter for plan in plans.values() for place in plan.placements}
    own = (
        TensorPlan(
            p.name, p.dtype, p.shape, (Placement.identity(p.name, p.shape),), p.name in reached
        )
        for p in parameters
        if p.name not in plans
    )
    return Layout.of(parameters, (*plans.values(), *own))


def _whole(
    plans: dict[str, TensorPlan], specs: Mapping[str, ParameterSpec]
) -> dict[str, TensorPlan]:
    """Leave out tensors of parameters that the tensors together do not fill."""
    while True:
        filled: Counter[str] = Counter()
        for plan in plans.values():
            for place in plan.placements:
                filled[place.parameter] += place.dest.numel
        whole = {name for name, count in filled.items() if count == math.prod(specs[name].shape)}
        kept = {
            name: plan
            for name, plan in plans.items()
            if all(place.parameter in whole for place in plan.placements)
        }
        if len(kept) == len(plans):
            return kept
        plans = kept


class _Views(TorchFunctionMode):
    """Keeps results views of what they were made of, and remembers what was joined."""

    def __init__(self) -> None:
        super().__init__()
        self._joined: dict[StorageWeakRef, tuple[torch.Tensor, list[torch.Tensor], int]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation of the conversion."""
        if func is torch.Tensor.contiguous:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.cat:
            bound = _cat_arguments(*args, **(kwargs or {}))
            self._joined[_key(result)] = (result, *bound)
        return result

    def placements(
        self,
        tensor: torch.Tensor,
        origins: Mapping[StorageWeakRef, str],
        specs: Mapping[str, ParameterSpec],
    ) -> list[Placement]:
        """Return where the elements of a result lie; nothing if boxes can't say it."""
        key = _key(tensor)
        if key in origins:
            spec = specs[origins[key]]
            return [place] if (place := _box(tensor, spec)) else []
        if key not in self._joined:
            return []
        result, parts, dim = self._joined[key]
        if (tensor.shape, tensor.stride()) != (result.shape, result.stride()):
            return []
        places, start = list[Placement](), 0
        for part in parts:
            by = [start if d == dim else 0 for d in range(tensor.ndim)]
            inner = self.placements(part, origins, specs)
            places += [replace(p, source=p.source.shift(by)) for p in inner]
            start += part.shape[dim]
        return places


def _cat_arguments(tensors: Sequence[torch.Tensor], dim: int = 0) -> tuple[list[torch.Tensor], int]:
    return list(tensors), dim % tensors[0].ndim


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _box(view: torch.Tensor, spec: ParameterSpec) -> Placement | None:
    """Read from the strides of a view which box of a contiguous parameter it is."""
    if view.numel() == 0:
        return Placement.identity(spec.name, spec.shape) if view.shape == spec.shape else None
    offset = int(view.storage_offset())
    offsets: list[int] = []
    axes: list[int | None] = [None] * len(spec.shape)
    for d, size in enumerate(spec.shape):
        stride = math.prod(spec.shape[d + 1 :])
        offsets.append(offset // stride)
        offset %= stride
        if size > 1:
            axes[d] = next(
                (a for a in range(view.ndim) if view.shape[a] > 1 and view.stride(a) == stride),
                None,
            )
    sizes = tuple(1 if a is None else view.shape[a] for a in axes)
    dest = Region(tuple(offsets), sizes)
    if dest.numel != view.numel() or not dest.fits(spec.shape):
        return None
    return Placement(Region.whole(view.shape), spec.name, dest, tuple(axes))
