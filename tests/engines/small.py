"""Small models of transformers with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


C = TypeVar("C")


def _config(make: Callable[..., C], **changes: Any) -> C:
    return make(**{**_SIZES, **changes})


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Return a dense model without an end token: it generates as much as it is asked for."""
    torch.manual_seed(seed)
    config = _config(LlamaConfig, bos_token_id=None, eos_token_id=None, **changes)
    return LlamaForCausalLM(config)


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    """Return a mixture of experts."""
    torch.manual_seed(seed)
    return MixtralForCausalLM(_config(MixtralConfig, num_local_experts=3))


def _tied(seed: int) -> PreTrainedModel:
    return llama(seed, tie_word_embeddings=True)


def _qwen2(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(_config(Qwen2Config))


def _qwen3_moe(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {"num_experts": 3, "moe_intermediate_size": 4, "head_dim": 4}
    return Qwen3MoeForCausalLM(_config(Qwen3MoeConfig, **sizes))


def _gpt2(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=16))


def _clip(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return CLIPTextModel(_config(CLIPTextConfig))


def _nomic_bert(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return NomicBertModel(_config(NomicBertConfig))


MAKERS = {
    "llama": llama,
    "tied": _tied,
    "mixtral": mixtral,
    "qwen2": _qwen2,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
    "clip_text": _clip,
    "nomic_bert": _nomic_bert,
}
"""By name; each takes a seed. Checkpoints of nomic_bert are fused where the module is not."""
