"""The few functions of vLLM's own reloading that are used here; all that is private is here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
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

LATE_TENSORS = ("bias",)
"""Tensors that vLLM never brings back to the form of the checkpoint."""


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
