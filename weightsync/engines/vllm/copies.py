"""Watches what the loading of a model does to its parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
_CLONE = (_aten.clone.default, _aten._to_copy.default)  # noqa: SLF001 - it is called so


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
        self._sources: dict[int, _Source] = {}
        # By storage, the names of all that its elements come from.
        self._origins: dict[int, frozenset[str]] = {}
        # A storage that is freed meanwhile would lend its address to another.
        self._alive: list[torch.Tensor] = []

    def source(self, name: str, form: TensorForm) -> torch.Tensor:
        """Return a tensor that stands for one of the checkpoint."""
        tensor = torch.empty(form.shape, dtype=form.dtype, device="meta")
        self._sources[_storage(tensor)] = _Source(name, Form.contiguous(form.shape))
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
        if not targets and func not in _CLONE:
            made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor) and self._knows(made):
                # A view, as most operations of loaders make. There are millions of them.
                return made
            self._derive(self._origins_of((args, kwargs)), (), made)
            return made
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
        if origins and func is _aten._to_copy.default:  # noqa: SLF001 - it is called so
            # What has no memory can't be brought to a device that has.
            kwargs = kwargs | {"device": None}
        made = func(*args, **kwargs)
        self._derive(origins, targets, made)
        if not targets and origins:
            self._follow(args[0], made)
        return made

    def _note(self, source: torch.Tensor, dest: torch.Tensor, parameter: str, form: Form) -> None:
        origins = self._origins_of(source)
        if not origins:
            return  # a constant
        start = self._sources.get(_storage(source))
        exact = start is not None and start.dtype in {None, dest.dtype}
        if start is None or not exact or source.shape != dest.shape:
            self._compute(parameter, origins)
            return
        self._feed(parameter, origins)
        try:
            found = start.place(source, _view(dest), form, parameter)
        except NotABoxError:
            self.computed.add(parameter)
            return
        if found is not None and found not in self.found[start.name]:
            self.found[start.name].append(found)

    def _follow(self, source: torch.Tensor, clone: torch.Tensor) -> None:
        """Take a clone for what it is a clone of."""
        start = self._sources.get(_storage(source))
        if start is None:
            return
        dtype = clone.dtype if clone.dtype is not source.dtype else start.dtype
        if start.dtype not in {None, dtype}:
            return  # rounded twice
        form = _form_of(clone)
        try:
            through = start.place(source, _view(clone), form, "")
        except NotABoxError:
            return
        self._sources[_storage(clone)] = _Source(start.name, form, dtype, through)

    def _compute(self, parameter: str, origins: frozenset[str]) -> None:
        self.computed.add(parameter)
        self._feed(parameter, origins)

    def _feed(self, parameter: str, origins: frozenset[str]) -> None:
        self.fed.setdefault(parameter, set()).update(origins)

    def _derive(
        self, origins: frozenset[str], targets: Iterable[torch.Tensor], made: object
    ) -> None:
        if not origins:
            return
        for tensor in targets:
            # It is the checkpoint's no more.
            self._sources.pop(_storage(tensor), None)
        for tensor in (*targets, *_tensors(made)):
            storage = _storage(tensor)
            self._origins[storage] = self._origins.get(storage, frozenset()) | origins
            self._alive.append(tensor)

    def _knows(self, tensor: torch.Tensor) -> bool:
        storage = _storage(tensor)
        return storage in self._origins or storage in self._parameters

    def _origins_of(self, values: object) -> frozenset[str]:
        found: set[str] = set()
        for tensor in _tensors(values):
            storage = _storage(tensor)
            found |= self._origins.get(storage, frozenset())
            if storage in self._parameters:
                found |= self.fed.get(self._parameters[storage][0], set())
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Source:
    """What a storage has of a tensor of the checkpoint.

    Attributes:
        name: Of the tensor.
        form: Of the whole that lies in the storage.
        dtype: What the elements were rounded to; None: they are the checkpoint's.
        through: Where the elements come from, unless the storage is the tensor itself.
    """

    name: str
    form: Form
    dtype: torch.dtype | None = None
    through: Placement | None = None

    def place(
        self, source: torch.Tensor, dest: View, dest_form: Form, parameter: str
    ) -> Placement | None:
        """Return the placement that copies a view of the storage; see `boxes.place`."""
        found = place(_view(source), self.form, dest, dest_form, parameter)
        return found if found is None or self.through is None else found.after(self.through)


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
    for position, name in _writes(func):
        yield from _tensors(args[position] if position < len(args) else kwargs.get(name))


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:  # noqa: ANN401
    arguments = enumerate(func._schema.arguments)  # noqa: SLF001 - there is no other way to it
    return tuple((i, argument.name) for i, argument in arguments if argument.is_write)


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
