"""Small models that the sharing tests load beside each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from weightsync.loader import Cause, Pair, Place, SharingReport

VOCABULARY, WIDTH = 16, 8


def llama(*, layers: int = 2, seed: int = 0, tied: bool = False, **config: Any) -> Any:
    """Return a tiny LlamaForCausalLM with random weights in evaluation mode."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**settings | config))
    return model.eval()


class Tiny(nn.Module):
    """Embedding, one layer, head; with a buffer that is saved and one that is not."""

    has_own_embed_tokens: bool
    has_own_lm_head: bool

    def __init__(self, *, width: int = WIDTH, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.fc = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.rot: torch.Tensor
        self.register_buffer("rot", torch.ones(width), persistent=False)
        self.register_buffer("rbias", torch.zeros(width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits of shape `ids.shape + (vocabulary,)`."""
        logits: torch.Tensor = self.head(self.fc(self.embed(ids) * self.rot))
        return logits


class SharedHead(nn.Module):
    """The head of one MTP layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class Mtp(nn.Module):
    """A draft of several prediction layers, each with a head of its own."""

    has_own_lm_head: bool
    lm_head: nn.Module | None

    def __init__(self, layers: Iterable[str], container: type[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        modules = {name: nn.ModuleDict({"shared_head": SharedHead()}) for name in layers}
        self.layers = (
            nn.ModuleDict(modules)
            if container is nn.ModuleDict
            else nn.ModuleList(modules.values())
        )

    def head_of(self, layer: str) -> nn.Linear:
        """Return the head of one layer."""
        head = self.get_submodule(f"layers.{layer}.shared_head.head")
        assert isinstance(head, nn.Linear)
        return head


class Packed(nn.Module):
    """A quantized layer: packed integers and scales, no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight_packed", torch.zeros(4, 4, dtype=torch.int32))
        self.register_buffer("weight_scale", torch.ones(4))


def other_width(draft: Tiny) -> None:
    """Give the draft an embedding of another width."""
    draft.embed = nn.Embedding(VOCABULARY, WIDTH - 1)


def other_dtype(draft: Tiny) -> None:
    """Give the draft's embedding another dtype."""
    draft.embed.bfloat16()


def unlike_embeddings() -> list[tuple[Callable[[Tiny], Any], Cause]]:
    """Return changes after which a draft's embedding can't be the verifier's, and the causes."""

    def replace(table: nn.Module) -> Callable[[Tiny], Any]:
        return lambda draft: draft.register_module("embed", copy.deepcopy(table))

    scaled = nn.Embedding(VOCABULARY, WIDTH)
    scaled.weight_scale = nn.Parameter(torch.ones(1))
    integers = nn.Embedding(VOCABULARY, WIDTH)
    zeros = torch.zeros(VOCABULARY, WIDTH, dtype=torch.int8)
    integers.weight = nn.Parameter(zeros, requires_grad=False)
    return [
        (other_width, Cause.SHAPE),
        (replace(nn.Embedding(VOCABULARY // 2, WIDTH)), Cause.SHAPE),
        (replace(nn.Embedding(VOCABULARY // 2, WIDTH * 2)), Cause.SHAPE),
        (other_dtype, Cause.DTYPE),
        (replace(Packed()), Cause.NOT_PLAIN),
        (replace(scaled), Cause.NOT_PLAIN),
        (replace(integers), Cause.NOT_PLAIN),
        (replace(nn.Identity()), Cause.NOT_IN_DRAFT),
    ]


def pair_at(report: SharingReport, place: Place) -> Pair:
    """Return the only pair of a report at a place."""
    (pair,) = (pair for pair in report.pairs if pair.place is place)
    return pair


def write(parameter: torch.Tensor, value: float) -> None:
    """Write one value into a tensor, in place."""
    with torch.no_grad():
        parameter.fill_(value)


def twin(model: nn.Module) -> Any:
    """Return a copy with equal bytes in storages of its own."""
    return copy.deepcopy(model)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def snapshot(model: nn.Module) -> dict[str, bytes]:
    """Return the bytes of all tensors of a model by name."""
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def flip_one_bit(tensor: torch.Tensor) -> None:
    """Change the lowest bit of the last element."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[-tensor.itemsize] ^= 1
