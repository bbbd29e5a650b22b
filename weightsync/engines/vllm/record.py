"""Where the tensors of a checkpoint go, learnt from the model's own `load_weights`.

The loading is done once more with tensors that have a shape but no memory, and each copy that it
makes into a parameter is noted instead of made. So fused projections, experts, padding, replicated
heads and the shards of tensor parallelism need no table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from weightsync.core.errors import UnsupportedError
from weightsync.engines.vllm.boxes import Form, NotABoxError, View, place
from weightsync.engines.vllm.checkpoint import TensorForm
from weightsync.engines.vllm.reload import LATE_TENSORS, loading_form
from weightsync.layout.plan import Placement


@dataclass(slots=True)
class Record:
    """What loading a checkpoint does to a model.

    Attributes:
        placements: By checkpoint name; none for a tensor that this worker does not use.
        forms: Type and shape of the parameters that are written, as they are while loading, by
            the engine's name.
    """

    placements: dict[str, list[Placement]]
    forms: dict[str, TensorForm] = field(default_factory=dict)


def record(model: Any, tensors: Mapping[str, TensorForm]) -> Record:  # noqa: ANN401 - an nn.Module with `load_weights`
    """Find out where a checkpoint's tensors go; the model stays as it is.

    Call it while no forward pass runs.

    Args:
        model: Loaded.
        tensors: The checkpoint's, all of them: some loaders want to see a complete set.

    Raises:
        UnsupportedError: loading changes values, so that writing a part of them is not possible.
    """
    modules = list(model.modules())
    with torch.no_grad(), _kept_attributes(modules), loading_form(modules):
        parameters = _parameters(model)
        copies = _Copies(parameters)
        meta = [(name, copies.source(name, form)) for name, form in tensors.items()]
        with copies, disable_mtp_completeness_check():
            try:
                model.load_weights(iter(meta))
            except Exception as error:
                raise UnsupportedError(
                    f"{type(model).__name__} can't be followed while it loads: {error}"
                ) from error
        if copies.refused:
            raise UnsupportedError(
                f"{type(model).__name__} loads tensors in a way that can't be followed: "
                + "; ".join(dict.fromkeys(copies.refused))
            )
        owners = dict(model.named_modules(remove_duplicate=False))
        written = {p.parameter for places in copies.found.values() for p in places}
        return Record(
            copies.found,
            {n: _form(owners, n, t) for n, t in parameters.items() if n in written},
        )


@contextmanager
def _kept_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Bring back the tensors that loaders derive and keep as plain attributes."""
    kept = [
        (module, {n: value for n, value in vars(module).items() if isinstance(value, torch.Tensor)})
        for module in modules
    ]
    try:
        yield
    finally:
        for module, values in kept:
            vars(module).update(values)


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _form(owners: Mapping[str, nn.Module], name: str, tensor: torch.Tensor) -> TensorForm:
    owner, _, leaf = name.rpartition(".")
    dtype = tensor.dtype
    if leaf in LATE_TENSORS:
        # Widened after loading, when it had been rounded to the type of the layer already.
        dtype = getattr(owners[owner], "params_dtype", dtype)
    return TensorForm(dtype, tuple(tensor.shape))


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the copies from tensors of a checkpoint into parameters, and makes none of them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, list[Placement]] = {}
        self.refused: list[str] = []
        self._parameters: dict[int, tuple[str, Form]] = {}
        for name, tensor in parameters.items():
            # The first name of what is tied.
            self._parameters.setdefault(_storage(tensor), (name, _form_of(tensor)))
        self._sources: dict[int, tuple[str, Form]] = {}
        # A storage that is freed meanwhile would lend its address to another.
        self._alive: list[torch.Tensor] = []

    def source(self, name: str, form: TensorForm) -> torch.Tensor:
        """Return a tensor that stands for one of the checkpoint."""
        tensor = torch.empty(form.shape, dtype=form.dtype, device="meta")
        self._sources[_storage(tensor)] = (name, Form.contiguous(form.shape))
        self._alive.append(tensor)
        self.found[name] = []
        return tensor

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Look at one operation of torch."""
        del types
        if func is torch.ops.aten.copy_.default and _storage(args[0]) in self._parameters:
            self._note(args[1], args[0])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _note(self, source: torch.Tensor, dest: torch.Tensor) -> None:
        parameter, dest_form = self._parameters[_storage(dest)]
        name, source_form = self._sources.get(_storage(source), ("", dest_form))
        if not name or source.shape != dest.shape:
            self.refused.append(f"{parameter!r} is computed, not copied")
            return
        try:
            found = place(_view(source), source_form, _view(dest), dest_form, parameter)
        except NotABoxError as error:
            self.refused.append(f"{name!r} goes to {parameter!r} in no box: {error}")
            return
        if found is not None and found not in self.found[name]:
            self.found[name].append(found)


def _storage(tensor: torch.Tensor) -> int:
    # Tensors on the meta device have no address.
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return identity


def _view(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _form_of(tensor: torch.Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.stride())
