"""Cutting tensors of one model off another model that holds them too."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable

import torch
from torch import nn

from weightsync.apply.bits import storage_identity
from weightsync.core.errors import UnsupportedError


def unshare(draft: nn.Module, verifier: nn.Module, storages: Collection[Hashable]) -> None:
    """Give what a draft holds on some storages a storage of its own, with equal values.

    Ties within the draft stay: all that lies on one storage moves to one storage. Parameters keep
    their class and attributes. A module that both models hold becomes two.

    Args:
        draft: Changed in place.
        verifier: Keeps what it has.
        storages: Values of `storage_identity`.

    Raises:
        UnsupportedError: the draft is a part of the verifier; nothing was changed.
    """
    foreign = set(verifier.modules())
    if draft in foreign:
        raise UnsupportedError(
            "the draft is a module of the verifier, so that they can't be unshared; "
            "update these weights with the verifier"
        )
    cut = _Cut(frozenset(storages))
    _separate(draft, foreign, cut, {})
    for module in draft.modules():
        if cut.holds(module):
            cut.replace(module)


class _Cut:
    """The tensors that move: each old object becomes one new one, each storage one new one."""

    def __init__(self, storages: frozenset[Hashable]) -> None:
        self._storages = storages
        self._data: dict[Hashable, torch.Tensor] = {}
        self._moved: dict[nn.Parameter, nn.Parameter] = {}

    def holds(self, module: nn.Module) -> bool:
        held = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
        return any(t is not None and storage_identity(t) in self._storages for t in held)

    def replace(self, module: nn.Module) -> None:
        for name, parameter in module._parameters.items():  # noqa: SLF001 - no hook, no check
            if parameter is not None and storage_identity(parameter) in self._storages:
                module._parameters[name] = self._parameter(parameter)  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and storage_identity(buffer) in self._storages:
                module._buffers[name] = self._clone(buffer)  # noqa: SLF001

    def _parameter(self, old: nn.Parameter) -> nn.Parameter:
        if old not in self._moved:
            make = torch.Tensor._make_subclass  # noqa: SLF001 - as `copy.deepcopy` of torch does
            new: nn.Parameter = make(type(old), self._clone(old), old.requires_grad)
            new.__dict__.update(old.__dict__)
            self._moved[old] = new
        return self._moved[old]

    def _clone(self, old: torch.Tensor) -> torch.Tensor:
        identity = storage_identity(old)
        if identity not in self._data:
            self._data[identity] = old.detach().clone()
        return self._data[identity]


def _separate(
    parent: nn.Module, foreign: set[nn.Module], cut: _Cut, twins: dict[nn.Module, nn.Module]
) -> None:
    """Put twins in the place of the verifier's modules in which something is to be replaced."""
    for name, child in parent._modules.items():  # noqa: SLF001 - duplicates included
        if child is None or not any(cut.holds(m) for m in child.modules()):
            continue
        own = twins.setdefault(child, _twin(child)) if child in foreign else child
        parent._modules[name] = own  # noqa: SLF001
        _separate(own, foreign, cut, twins)


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    for held in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[held] = dict(twin.__dict__[held])
    return twin
