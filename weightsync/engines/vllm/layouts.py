"""The layout of a model of vLLM, put together from what was found out about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

from weightsync.apply.bits import storage_identity
from weightsync.apply.dtypes import from_torch
from weightsync.engines.naming import parameter_spec
from weightsync.engines.vllm.checkpoint import TensorForm
from weightsync.engines.vllm.record import Record
from weightsync.engines.vllm.shadow import Shadows
from weightsync.engines.vllm.slots import Sent, Slot
from weightsync.layout.plan import Layout, ParameterSpec, Placement, TensorPlan


def layout_of(
    found: Record,
    forms: Mapping[str, TensorForm],
    places: Mapping[str, Slot | Sent],
    shadows: Shadows,
    verifier: Layout | None,
) -> Layout:
    """Return the parameters that tensors reach, under each of their names, and the tensors.

    Args:
        found: Where tensors go that are copied.
        forms: Of all tensors of the checkpoint, by name.
        places: By the engine's name, and by `sent_name` what the model loads itself.
        shadows: Stand for parameters.
        verifier: Layout of the verifier, for a draft.
    """
    reached = {storage_identity(shadows.tensor(slot)) for slot in shadows.known}
    specs = []
    for name, place in places.items():
        tensor = shadows.tensor(place)
        is_reached = tensor.numel() and storage_identity(tensor) in reached
        if isinstance(place, Sent) or name in found.forms or is_reached:
            specs.append(parameter_spec(name, tensor))
    tensors = [
        _reloaded(name, form) if sent_name(name) in places else _copied(name, form, found)
        for name, form in forms.items()
    ]
    owners = _owners(specs, tensors)
    if verifier is not None:
        owners = _owners(verifier.parameters.values(), verifier.tensors.values()) | owners
    return Layout.of(specs, [*tensors, *_tied(specs, tensors, owners)])


def sent_name(name: str) -> str:
    """Return the parameter that stands for a tensor which the model loads itself."""
    return f"checkpoint/{name}"


def _reloaded(name: str, form: TensorForm) -> TensorPlan:
    place = Placement.identity(sent_name(name), form.shape)
    return TensorPlan(name, from_torch(form.dtype), form.shape, (place,), reloaded=True)


def _copied(name: str, form: TensorForm, found: Record) -> TensorPlan:
    places = found.placements[name]
    dtype = found.forms[places[0].parameter].dtype if places else form.dtype
    return TensorPlan(name, from_torch(dtype), form.shape, tuple(places))


def _owners(
    specs: Iterable[ParameterSpec], tensors: Collection[TensorPlan]
) -> dict[Hashable, TensorPlan]:
    """Return, by storage, the tensors that are all that is loaded into a parameter."""
    reached = Counter(place.parameter for plan in tensors for place in plan.placements)
    whole = {
        plan.placements[0].parameter: plan
        for plan in tensors
        if len(plan.placements) == 1 and reached[plan.placements[0].parameter] == 1
    }
    return {spec.storage: whole[spec.name] for spec in specs if spec.name in whole}


def _tied(
    specs: Iterable[ParameterSpec],
    tensors: Iterable[TensorPlan],
    owners: Mapping[Hashable, TensorPlan],
) -> Iterator[TensorPlan]:
    """Yield a tensor for each parameter that another name stands for, named as in state dicts.

    That of a head that is tied, say, or of the verifier's embedding in a draft without one.
    """
    reached = {place.parameter for plan in tensors for place in plan.placements}
    taken = {plan.name for plan in tensors if plan.placements}
    for spec in specs:
        if spec.name not in reached | taken and spec.storage in owners:
            owner = owners[spec.storage]
            places = tuple(replace(place, parameter=spec.name) for place in owner.placements)
            yield replace(owner, name=spec.name, placements=places)
