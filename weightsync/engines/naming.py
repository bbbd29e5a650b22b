"""The tensors of a module under the names that its checkpoint has, and which are one storage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from weightsync.apply.bits import storage_identity
from weightsync.apply.dtypes import from_torch
from weightsync.core.errors import UnsupportedError
from weightsync.layout.plan import ParameterSpec

# Wrappers by class, with the child that they wrap. A child that merely has such a name is none.
# By name of the class, since importing all of them takes seconds.
_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
    ): "_fsdp_wrapped_module",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "CheckpointWrapper",
    ): "_checkpoint_wrapped_module",
}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers (compilation, data parallelism, checkpointing)."""
    for cls in type(module).__mro__:
        child = _WRAPPERS.get((cls.__module__, cls.__name__))
        if child is not None:
            return unwrap(module.get_submodule(child))
    return module


def named_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a module, in the order of its state dict.

    Tied tensors appear under each of their names; wrappers appear in no name.
    """
    return dict(_walk(unwrap(root), ""))


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module._parameters.items():  # noqa: SLF001 - the public way hides ties
        if parameter is not None:
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield prefix + name, buffer
    for name, child in module._modules.items():  # noqa: SLF001 - the same
        if child is not None:
            yield from _walk(unwrap(child), f"{prefix}{name}.")


def parameter_spec(name: str, tensor: torch.Tensor) -> ParameterSpec:
    """Describe a tensor for the layout.

    Raises:
        UnsupportedError: it has no memory yet, or elements that the contract does not know.
    """
    if tensor.numel() and (tensor.is_meta or not tensor.data_ptr()):
        raise UnsupportedError(
            f"{name!r} has no memory of its own ({type(tensor).__name__} on {tensor.device}); "
            "load the model before serving it, and serve plain tensors"
        )
    try:
        dtype = from_torch(tensor.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name!r}: {error}") from error
    return ParameterSpec(name, dtype, tuple(tensor.shape), storage_identity(tensor))
