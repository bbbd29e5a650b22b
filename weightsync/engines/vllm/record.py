"""Where the tensors of a checkpoint go, learnt from the model's own `load_weights`.

The loading is done once more with tensors that have a shape but no memory, and each copy that it
makes into a parameter is noted instead of made. So fused projections, experts, padding, replicated
heads and the shards of tensor parallelism need no table.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from weightsync.core.errors import UnsupportedError
from weightsync.engines.vllm.checkpoint import TensorForm
from weightsync.engines.vllm.copies import Copies
from weightsync.engines.vllm.reload import (
    FUSE,
    kept_attributes,
    late_dtype,
    loading_form,
    plain_tensors,
)
from weightsync.layout.plan import Placement

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Group:
    """Modules whose loading computes with elements, and all tensors that reach any of them.

    The tensors reach no other modules, so that loading them again changes nothing else.
    """

    modules: tuple[nn.Module, ...]
    tensors: tuple[str, ...]


@dataclass(slots=True)
class Record:
    """What loading a checkpoint does to a model.

    Attributes:
        placements: By checkpoint name; none for a tensor that this worker does not use. Those of
            `groups` are left out.
        forms: Type and shape of the parameters that are so written, as they are while loading,
            by the engine's name.
        groups: What must be loaded by the model itself.
    """

    placements: dict[str, list[Placement]]
    forms: dict[str, TensorForm]
    groups: list[Group] = field(default_factory=list)


def record(model: Any, tensors: Mapping[str, TensorForm]) -> Record:  # noqa: ANN401 - an nn.Module with `load_weights`
    """Find out where a checkpoint's tensors go; the model stays as it is.

    Call it while no forward pass runs.

    Args:
        model: Loaded.
        tensors: The checkpoint's, all of them: some loaders want to see a complete set.

    Raises:
        UnsupportedError: the model has no `load_weights`.
    """
    if not hasattr(model, "load_weights"):
        raise UnsupportedError(
            f"{type(model).__name__} has no load_weights, from which weightsync learns where its "
            "weights lie; use an architecture that loads its own checkpoints"
        )
    modules = list(model.modules())
    with torch.no_grad(), kept_attributes(modules), loading_form(modules):
        owners = dict(model.named_modules(remove_duplicate=False))
        parameters = _parameters(model)
        copies = Copies(parameters)
        meta = [(name, copies.source(name, form)) for name, form in tensors.items()]
        with copies, disable_mtp_completeness_check():
            try:
                model.load_weights(iter(meta))
            except Exception as error:  # noqa: BLE001 - whatever a model's code may raise
                _log.warning("%s looks at values while it loads: %s", type(model).__name__, error)
                return Record({}, {}, [Group(tuple(modules), tuple(tensors))])
        for name, module in owners.items():
            for leaf, tensor in _tensors(module).items():
                copies.replaced(f"{name}.{leaf}" if name else leaf, tensor)
        groups = _groups(copies, {n: owners[n.rpartition(".")[0]] for n in copies.fed})
        apart = {name for group in groups for name in group.tensors}
        placements = {name: p for name, p in copies.found.items() if name not in apart}
        used = {p.parameter for places in placements.values() for p in places}
        forms = {n: _form(owners, n, t) for n, t in parameters.items() if n in used}
        return Record(placements, forms, groups)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a module holds after loading, its plain attributes included."""
    held = {**module._parameters, **module._buffers}  # noqa: SLF001 - its own ones only
    if not hasattr(module, FUSE):
        held |= plain_tensors(module)
    return {leaf: tensor for leaf, tensor in held.items() if tensor is not None}


def _groups(copies: Copies, owners: Mapping[str, nn.Module]) -> list[Group]:
    """Put together what computed parameters have in common, directly or through others."""
    sources: dict[nn.Module, set[str]] = {}
    reached: dict[str, set[nn.Module]] = {}
    for parameter, names in copies.fed.items():
        module = owners[parameter]
        sources.setdefault(module, set()).update(names)
        for name in names:
            reached.setdefault(name, set()).add(module)
    groups: list[Group] = []
    done: set[nn.Module] = set()
    for parameter in sorted(copies.computed):
        modules: dict[nn.Module, None] = {}
        todo = [owners[parameter]]
        while todo:
            module = todo.pop()
            if module not in modules and module not in done:
                modules[module] = None
                todo += [other for name in sources[module] for other in reached[name]]
        done |= modules.keys()
        if modules:
            names = set().union(*(sources[module] for module in modules))
            groups.append(Group(tuple(modules), _in_order(names, copies.found)))
    return groups


def _in_order(names: Collection[str], tensors: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in tensors if name in names)


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _form(owners: Mapping[str, nn.Module], name: str, tensor: torch.Tensor) -> TensorForm:
    owner, _, leaf = name.rpartition(".")
    return TensorForm(late_dtype(owners[owner], leaf, tensor), tuple(tensor.shape))
