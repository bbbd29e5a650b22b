"""Modules in the shape of those that vLLM's second model runner loads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.loader.models import VOCABULARY, WIDTH

INDEX_BUFFER = "topk_indices_buffer"


class Missing(nn.Identity):
    """What stands for a layer that another pipeline stage owns."""


class WithLora(nn.Module):
    """An embedding with adapters, which answers for its base layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = torch.zeros(2, WIDTH)

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        if name in modules:
            return modules[name]
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(modules["base_layer"], name)


class Attention(nn.Module):
    """Sparse attention, whose index buffer several of its parts refer to."""

    def __init__(self, buffer: torch.Tensor | None) -> None:
        super().__init__()
        self.indexer = nn.Module()
        for module in (self, self.indexer):
            setattr(module, INDEX_BUFFER, buffer)


class MtpLayer(nn.Module):
    """A layer that computes logits through a head of its own."""

    def __init__(self, buffer: torch.Tensor | None) -> None:
        super().__init__()
        self.shared_head = nn.Module()
        self.shared_head.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.self_attn = Attention(buffer)


class Inner(nn.Module):
    """What lies under `model`: the embedding, layers, perhaps an index buffer."""

    embed_tokens: Any

    def __init__(self, embedding: str, layers: nn.Module, buffer: torch.Tensor | None) -> None:
        super().__init__()
        self.register_module(embedding, nn.Embedding(VOCABULARY, WIDTH))
        self.layers = layers
        if buffer is not None:
            setattr(self, INDEX_BUFFER, buffer)


class Causal(nn.Module):
    """A causal language model; attributes `has_own_...` are set by who makes it."""

    has_own_embed_tokens: bool
    has_own_lm_head: bool
    model: Any
    lm_head: Any

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.model = inner
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class Conditional(nn.Module):
    """A multi-modal model around a language model."""

    def __init__(self, causal: Causal) -> None:
        super().__init__()
        self.visual = nn.ModuleDict({"embedding": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
        self.language_model = causal

    def get_language_model(self) -> nn.Module:
        """Return the language model."""
        return self.language_model


class GraphWrapper:
    """What captures graphs of a model, or cuts its batches; it answers for the model."""

    def __init__(self, runnable: object) -> None:
        self.runnable = runnable

    def __getattr__(self, key: str) -> Any:
        return getattr(self.runnable, key)

    def unwrap(self) -> Any:
        """Return the model inside."""
        return self.runnable


def verifier(
    *, seed: int = 0, embedding: str = "embed_tokens", buffer: torch.Tensor | None = None
) -> Causal:
    """Return a verifier of one layer without a head of its own."""
    torch.manual_seed(seed)
    layer = nn.Module()
    layer.self_attn = Attention(buffer)
    return Causal(Inner(embedding, nn.ModuleList([layer]), buffer))


def mtp(
    *,
    seed: int = 1,
    layers: Iterable[str] = ("61", "62"),
    container: type[nn.Module] = nn.ModuleDict,
    buffer: torch.Tensor | None = None,
) -> Causal:
    """Return a draft of several prediction layers, with weights of its own everywhere."""
    torch.manual_seed(seed)
    made = {name: MtpLayer(buffer) for name in layers}
    held = nn.ModuleDict(made) if container is nn.ModuleDict else nn.ModuleList(made.values())
    return Causal(Inner("embed_tokens", held, buffer))


def embedding_of(model: nn.Module) -> Any:
    """Return the weight of the input embedding."""
    inner = model.get_submodule("model")
    return getattr(inner, "embed_tokens" if hasattr(inner, "embed_tokens") else "embedding").weight


def layer_heads(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the heads of layers."""
    return [p for name, p in model.named_parameters() if ".shared_head.head." in name]
