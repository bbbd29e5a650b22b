"""The few functions of vLLM's own reloading that are used here; all that is private is here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import (
    materialize_layer,
    restore_layer_on_meta,
)
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_tensors,
)
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from weightsync.engines.vllm.copies import Writes
from weightsync.engines.vllm.slots import Slot

LATE_TENSORS = ("bias",)
"""Tensors that vLLM never brings back to the form of the checkpoint."""

FUSE = "_build_fused_kv_buffers"
"""The method with which a draft fuses projections of its layers; what it makes is derived apart."""


@contextmanager
def loading_form(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules, within the block, parameters as they are while a checkpoint is loaded.

    They lie on the meta device and have the loaders' attributes. What the modules hold otherwise
    comes back behind the block, whatever happens in it: the same objects, untouched.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_one_in_loading_form(module))
        yield


@contextmanager
def _one_in_loading_form(module: nn.Module) -> Iterator[None]:
    info = get_layerwise_info(module)
    info.kernel_tensors = get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)  # noqa: SLF001
    try:
        restore_layer_on_meta(module, info)
        yield
    finally:
        _place_kernel_tensors(module, info)
        info.reset()


@contextmanager
def kept_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Bring back the tensors that loaders derive and keep as plain attributes."""
    kept = [(module, plain_tensors(module)) for module in modules]
    try:
        yield
    finally:
        for module, values in kept:
            vars(module).update(values)


def plain_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module keeps as plain attributes."""
    return {n: value for n, value in vars(module).items() if isinstance(value, torch.Tensor)}


def process_again(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Let a module derive what its kernels use from other values, into the same tensors.

    Args:
        module: A leaf with a `quant_method`.
        values: Each of its parameters that the checkpoint fills, in the form of the checkpoint.
    """
    parameters, buffers = get_layer_params_buffers(module)
    kept = {**parameters, **buffers}
    with loading_form([module]):
        materialize_layer(module, get_layerwise_info(module))
        for name, tensor in get_layer_tensors(module).items():
            if name in values:
                tensor.data.copy_(values[name])
            elif name in kept and kept[name].shape == tensor.shape:
                tensor.data.copy_(kept[name])
        derive(module)
        for name, tensor in kept.items():
            made = getattr(module, name)
            if made is not tensor:
                tensor.data.copy_(made)


def load_again(
    model: Any,  # noqa: ANN401 - an nn.Module with `load_weights`
    modules: Sequence[nn.Module],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> dict[Slot, torch.Tensor]:
    """Let a model load tensors into some of its modules, which stay as they are.

    Args:
        model: Loaded.
        modules: All that the tensors reach.
        weights: Of the checkpoint, by name. The loader may change them.

    Returns:
        The tensors that were written, as they are before vLLM derives anything from them; plain
        attributes of the modules included.
    """
    with torch.no_grad(), kept_attributes(model.modules()), loading_form(modules):
        for module in modules:
            _give_memory(module)
        empty = _held(modules)
        with Writes() as writes, disable_mtp_completeness_check():
            model.load_weights(iter(weights))
        return {
            slot: tensor.data
            for slot, tensor in _held(modules).items()
            if empty.get(slot) is not tensor or writes.reached(tensor)
        }


def _held(modules: Iterable[nn.Module]) -> dict[Slot, torch.Tensor]:
    return {
        Slot(module, leaf): tensor
        for module in modules
        for leaf, tensor in (get_layer_tensors(module) | plain_tensors(module)).items()
    }


def made_up_again(module: nn.Module, leaf: str) -> torch.Tensor:
    """Return what vLLM has put into a tensor when it was told to make weights up."""
    with torch.no_grad(), loading_form([module]):
        held = getattr(module, leaf)
        if not held.is_meta:
            # It stayed in place.
            return _late_copy(module, leaf, held).data
        materialize_layer(module, get_layerwise_info(module))
        made: torch.Tensor = getattr(module, leaf)
        initialize_single_dummy_weight(made)
        return made.data


def _give_memory(module: nn.Module) -> None:
    """Give a module in loading form memory, filled with what it held or with zeros."""
    info = get_layerwise_info(module)
    held = info.kernel_tensors[0] | info.kernel_tensors[1]
    materialize_layer(module, info)
    for leaf, tensor in get_layer_tensors(module).items():
        if tensor is held.get(leaf):
            setattr(module, leaf, _late_copy(module, leaf, tensor))
        elif leaf in held and held[leaf].shape == tensor.shape:
            tensor.data.copy_(held[leaf])
        else:
            tensor.data.zero_()


def _late_copy(module: nn.Module, leaf: str, tensor: torch.Tensor) -> torch.Tensor:
    """Copy what stays in place when a module takes its loading form."""
    copy = tensor.data.to(late_dtype(module, leaf, tensor), copy=True)
    copy.__class__ = tensor.__class__
    copy.__dict__ = tensor.__dict__.copy()
    return copy


def late_dtype(module: nn.Module, leaf: str, tensor: torch.Tensor) -> torch.dtype:
    """Return the type that a tensor in loading form has: late ones are widened after loading."""
    dtype: torch.dtype = tensor.dtype
    if leaf in LATE_TENSORS:
        dtype = getattr(module, "params_dtype", dtype)
    return dtype


def derive(module: Any) -> None:  # noqa: ANN401 - an nn.Module with a `quant_method`
    """Let a module derive what its kernels use from the parameters that it holds now."""
    vars(module).pop("_already_called_process_weights_after_loading", None)
    method = module.quant_method
    # This method packs experts for the CPU only when it makes its kernel.
    if getattr(method, "moe_kernel", None) is not None and _is_on_cpu(module):
        method.moe_kernel = None
    method.process_weights_after_loading(module)
    if hasattr(module, "update_param_tp_status"):
        module.update_param_tp_status()


def _is_on_cpu(module: nn.Module) -> bool:
    return all(tensor.device.type == "cpu" for tensor in module.parameters())
