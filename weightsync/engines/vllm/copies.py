"""Watches what the loading of a model does to its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.engines.vllm.boxes import Form, NotABoxError, View, place
from weightsync.engines.vllm.checkpoint import TensorForm
from weightsync.layout.plan import Placement

_aten = torch.ops.aten
# What a loader puts into padding.
_CONSTANT = (_aten.fill_.Scalar, _aten.zero_.default)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what goes from tensors of a checkpoint into parameters, and lets none of it happen.

    Attributes:
        found: Copies of boxes, by the checkpoint's name.
        fed: By parameter, the names of all that its elements come from, on whatever way.
        computed: Parameters with elements that are no plain copies.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Watch these parameters; those that are tied count under the first name."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, list[Placement]] = {}
        self.fed: dict[str, set[str]] = {}
        self.computed: set[str] = set()
        self._parameters: dict[int, tuple[str, Form]] = {}
        for name, tensor in parameters.items():
            self._parameters.setdefault(_storage(tensor), (name, _form_of(tensor)))
        self._sources: dict[int, tuple[str, Form]] = {}
        # By storage, the names of all that its elements come from.
        self._origins: dict[int, frozenset[str]] = {}
        # A storage that is freed meanwhile would lend its address to another.
        self._alive: list[torch.Tensor] = []

    def source(self, name: str, form: TensorForm) -> torch.Tensor:
        """Return a tensor that stands for one of the checkpoint."""
        tensor = torch.empty(form.shape, dtype=form.dtype, device="meta")
        self._sources[_storage(tensor)] = (name, Form.contiguous(form.shape))
        self._origins[_storage(tensor)] = frozenset([name])
        self._alive.append(tensor)
        self.found[name] = []
        return tensor

    def replaced(self, name: str, tensor: torch.Tensor) -> None:
        """Look at what a parameter is after the loading: it may be another tensor."""
        if _storage(tensor) not in self._parameters and self._origins.get(_storage(tensor)):
            self._compute(name, self._origins[_storage(tensor)])

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Look at one operation of torch."""
        del types
        kwargs = kwargs or {}
        targets = list(written(func, args, kwargs))
        origins = self._origins_of((args, kwargs))
        parameters = [t for t in targets if _storage(t) in self._parameters]
        for parameter in parameters:
            name, form = self._parameters[_storage(parameter)]
            if func is _aten.copy_.default:
                self._note(args[1], parameter, name, form)
            elif func not in _CONSTANT:
                self._compute(name, origins)
        if parameters:
            return args[0]
        if func is _aten._to_copy.default and origins:  # noqa: SLF001 - it is called so
            kwargs = kwargs | {"device": None}
        made = func(*args, **kwargs)
        if origins:
            self._derive(origins, targets, made)
        return made

    def _note(self, source: torch.Tensor, dest: torch.Tensor, parameter: str, form: Form) -> None:
        origins = self._origins_of(source)
        if not origins:
            return  # a constant
        name, source_form = self._sources.get(_storage(source), ("", form))
        if not name or source.shape != dest.shape:
            self._compute(parameter, origins)
            return
        self._feed(parameter, origins)
        try:
            found = place(_view(source), source_form, _view(dest), form, parameter)
        except NotABoxError:
            self.computed.add(parameter)
            return
        if found is not None and found not in self.found[name]:
            self.found[name].append(found)

    def _compute(self, parameter: str, origins: frozenset[str]) -> None:
        self.computed.add(parameter)
        self._feed(parameter, origins)

    def _feed(self, parameter: str, origins: frozenset[str]) -> None:
        self.fed.setdefault(parameter, set()).update(origins)

    def _derive(self, origins: frozenset[str], targets: list[torch.Tensor], made: object) -> None:
        for tensor in targets:
            # It is the checkpoint's no more.
            self._sources.pop(_storage(tensor), None)
        for tensor in (*targets, *_tensors(made)):
            storage = _storage(tensor)
            self._origins[storage] = self._origins.get(storage, frozenset()) | origins
            self._alive.append(tensor)

    def _origins_of(self, values: object) -> frozenset[str]:
        found: set[str] = set()
        for tensor in _tensors(values):
            storage = _storage(tensor)
            found |= self._origins.get(storage, frozenset())
            if storage in self._parameters:
                found |= self.fed.get(self._parameters[storage][0], set())
        return frozenset(found)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which tensors are written."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: set[int] = set()

    def reached(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was written, or a view of it."""
        return _storage(tensor) in self._written

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Look at one operation of torch."""
        del types
        self._written |= {_storage(t) for t in written(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:  # noqa: ANN401
    """Yield the arguments of an operation that it writes."""
    for position, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - no other way to it
        if argument.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    # Tensors on the meta device have no address.
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return identity


def _view(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _form_of(tensor: torch.Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.stride())
