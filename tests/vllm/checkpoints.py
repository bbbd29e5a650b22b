"""Tiny random checkpoints of the architectures that vLLM knows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, INNER = 512, 64, 128
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_bias": True,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Tensors = dict[str, torch.Tensor]


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Yield names and shapes of the tensors of a causal language model."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from block(f"model.layers.{layer}.", config)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def block(prefix: str, config: Mapping[str, Any], *, width: int | None = None) -> Shapes:
    """Yield the tensors of one layer; `width`: of what goes into its attention."""
    hidden = config["hidden_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    for part, rows in (("q", query), ("k", key), ("v", key)):
        yield f"{prefix}self_attn.{part}_proj.weight", (rows, width or hidden)
        if config["attention_bias"]:
            yield f"{prefix}self_attn.{part}_proj.bias", (rows,)
    yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
    if config["model_type"].startswith("qwen3"):
        yield f"{prefix}self_attn.q_norm.weight", (config["head_dim"],)
        yield f"{prefix}self_attn.k_norm.weight", (config["head_dim"],)
    if "num_experts" not in config:
        yield from _mlp(f"{prefix}mlp.", hidden, config["intermediate_size"])
        return
    yield f"{prefix}mlp.gate.weight", (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)


def values(named: Shapes, seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return random tensors that make a model's greedy tokens vary."""
    random = torch.Generator().manual_seed(seed)

    def one(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=random)
        if len(shape) == 1:
            return (0.1 * noise + (not name.endswith("bias"))).to(dtype)
        return (0.08 * noise).to(dtype)

    return {name: one(name, shape) for name, shape in named}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a checkpoint and return its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
