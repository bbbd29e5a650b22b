"""Llamas of our own whose loading is more than copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM

from tests.vllm import checkpoints

Weights = Iterable[tuple[str, torch.Tensor]]

SCALED = ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.input_layernorm.weight")
PERMUTED = "model.layers.0.self_attn.q_proj.weight"
JOINED = "model.layers.1.mlp.down_proj.weight"
HALVES = (f"{JOINED}.left", f"{JOINED}.right")


class ComputingLlama(LlamaForCausalLM):  # type: ignore[misc]
    """Scales some tensors, changes the order of rows, and joins two tensors."""

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a checkpoint."""
        loaded: set[str] = super().load_weights(self._computed(weights))
        return loaded

    def _computed(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        halves: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in SCALED:
                # In place, which must not reach what is kept of the tensor.
                yield name, tensor.mul_(1.5)
            elif name == PERMUTED:
                heads = tensor.view(checkpoints.HEADS, 2, checkpoints.HEAD_DIM // 2, -1)
                yield name, heads.transpose(1, 2).reshape(tensor.shape)
            elif name in HALVES:
                halves[name] = tensor
                if len(halves) == len(HALVES):
                    yield JOINED, torch.cat([halves[half] for half in HALVES], dim=1).sin()
            else:
                yield name, tensor


class LookingLlama(LlamaForCausalLM):  # type: ignore[misc]
    """Leaves out what is zero, for which it looks at the values."""

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a checkpoint."""
        seen = ((name, t * 0.5) for name, t in weights if t.any().item())
        loaded: set[str] = super().load_weights(seen)
        return loaded


COMPUTING = checkpoints.LLAMA | {"architectures": ["ComputingLlama"]}
LOOKING = checkpoints.LLAMA | {"architectures": ["LookingLlama"], "tie_word_embeddings": True}


for _model in (ComputingLlama, LookingLlama):
    # In each process that imports this.
    ModelRegistry.register_model(_model.__name__, _model)


def shapes(config: Mapping[str, Any]) -> checkpoints.Shapes:
    """Yield the tensors of their checkpoints."""
    for name, shape in checkpoints.shapes(config):
        if config is COMPUTING and name == JOINED:
            for half in HALVES:
                yield half, (shape[0], shape[1] // 2)
        else:
            yield name, shape
