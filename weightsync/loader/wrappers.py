"""Wrappers around models and layers, looked through to what holds the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from weightsync.core.errors import InvalidRequestError

Model: TypeAlias = nn.Module | Callable[..., object]
"""A model, or a graph wrapper around one, which need not be a module itself."""

# torch.compile, FSDP, activation checkpointing, and adapter layers (LoRA) of PEFT and engines.
_INNER_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
# Ordinary words, so they count only where the wrapper holds nothing else: DDP and graph wrappers.
_SOLE_CHILD_NAMES = ("module", "runnable")


def unwrap(model: Model) -> nn.Module:
    """Return the module inside all wrappers; the model itself if there are none.

    Raises:
        InvalidRequestError: there is no `nn.Module` inside.
    """
    current: object = model
    while (inner := _inner(current)) is not None:
        current = inner
    if not isinstance(current, nn.Module):
        raise InvalidRequestError(
            f"{type(model).__name__} is no torch module and wraps none: pass the model itself"
        )
    return current


def language_model(root: nn.Module) -> nn.Module:
    """Return the language model inside a multi-modal model; the model itself if it is none."""
    found = call_accessor(root, "get_language_model") or getattr(root, "language_model", None)
    if not isinstance(found, nn.Module) or found is root:
        return root
    return language_model(unwrap(found))


def strip_wrappers(path: str) -> str:
    """Return a module's path without the parts that name wrappers."""
    return ".".join(part for part in path.split(".") if part not in _INNER_NAMES)


def call_accessor(module: object, name: str) -> nn.Module | None:
    """Call a method without arguments that returns a module; None if there is no such method.

    Some engines use the same method names for something else, which takes arguments; and models
    without the part in question raise NotImplementedError.
    """
    method = getattr(module, name, None)
    if not inspect.isroutine(method):
        return None
    try:
        inspect.signature(method).bind()
    except TypeError:
        return None
    try:
        found = method()
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Module) else None


def _inner(wrapper: object) -> object | None:
    if not isinstance(wrapper, nn.Module):
        unwrap_method = getattr(wrapper, "unwrap", None)
        return unwrap_method() if callable(unwrap_method) else getattr(wrapper, "runnable", None)
    for name in _INNER_NAMES:
        inner = getattr(wrapper, name, None)
        if isinstance(inner, nn.Module):
            return inner
    children = dict(wrapper.named_children())
    if len(children) == 1 and not any(True for _ in wrapper.parameters(recurse=False)):
        name, child = next(iter(children.items()))
        if name in _SOLE_CHILD_NAMES:
            return child
    # PEFT. Elsewhere a method of that name may return a model without its head.
    return call_accessor(wrapper, "get_base_model") if hasattr(wrapper, "peft_config") else None
