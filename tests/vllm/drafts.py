"""Tiny pairs of verifier and draft, for each way in which vLLM speculates with a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.vllm.checkpoints import HIDDEN, LLAMA, QWEN2, VOCAB, Shapes, block, shapes, values, write

Tensors = dict[str, torch.Tensor]

DRAFT_VOCAB = 256
# The latent attention of the CPU is made for these sizes only.
_LATENT, _ROPE, _NOPE, _VALUE = 512, 64, 128, 128


@dataclass(frozen=True)
class Pair:
    """A kind of speculation.

    Attributes:
        method: vLLM's name for it.
        verifier: Config of the verifier.
        verifier_shapes: Its tensors; default: those of a causal language model.
        draft: Config of the draft; None: its weights are in the verifier's checkpoint.
        draft_shapes: The draft's tensors.
        fixed: Tensors of the draft that no training changes.
        num_tokens: How many tokens are proposed.
        options: Further options of vLLM.
    """

    method: str
    verifier: Mapping[str, Any]
    verifier_shapes: Callable[[Mapping[str, Any]], Shapes] = shapes
    draft: Mapping[str, Any] | None = None
    draft_shapes: Callable[[Mapping[str, Any]], Shapes] = shapes
    fixed: Callable[[], Tensors] = dict
    num_tokens: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, folder: Path, seed: int) -> Made:
        """Write both checkpoints."""
        target = values(self.verifier_shapes(self.verifier), seed)
        if self.draft is None:
            path = write(folder / "verifier", self.verifier, target)
            return Made(self, path, path, target, target)
        draft = values(self.draft_shapes(self.draft), seed + 100) | self.fixed()
        return Made(
            self,
            write(folder / "verifier", self.verifier, target),
            write(folder / "draft", self.draft, draft),
            target,
            draft,
        )


@dataclass(frozen=True)
class Made:
    """A pair's checkpoints."""

    pair: Pair
    verifier: Path
    draft: Path
    verifier_tensors: Tensors
    draft_tensors: Tensors

    @property
    def options(self) -> dict[str, Any]:
        """What vLLM is told of the draft."""
        speculative: dict[str, Any] = {
            "method": self.pair.method,
            "num_speculative_tokens": self.pair.num_tokens,
        }
        if self.pair.draft is not None:
            speculative["model"] = str(self.draft)
        return {"speculative_config": speculative, **self.pair.options}


def _eagle(config: Mapping[str, Any]) -> Shapes:
    yield "fc.weight", (HIDDEN, 2 * HIDDEN)
    for name, shape in block("layers.0.", config):
        if "input_layernorm" not in name:
            yield name, shape


def _eagle_own(config: Mapping[str, Any]) -> Shapes:
    yield from _eagle(config)
    yield "embed_tokens.weight", (VOCAB, HIDDEN)


def _eagle3(config: Mapping[str, Any]) -> Shapes:
    yield "fc.weight", (HIDDEN, 3 * HIDDEN)
    yield "norm.weight", (HIDDEN,)
    yield "lm_head.weight", (DRAFT_VOCAB, HIDDEN)
    yield "midlayer.hidden_norm.weight", (HIDDEN,)
    yield from block("midlayer.", config, width=2 * HIDDEN)


def _eagle3_vocabulary() -> Tensors:
    kept = torch.zeros(VOCAB, dtype=torch.bool)
    kept[::2] = True
    return {"d2t": torch.arange(DRAFT_VOCAB), "t2d": kept}


def _medusa(config: Mapping[str, Any]) -> Shapes:
    for head in range(config["num_heads"]):
        yield f"medusa_heads.{head}.0.linear.weight", (HIDDEN, HIDDEN)
        yield f"medusa_heads.{head}.1.weight", (VOCAB, HIDDEN)


def _dflash(config: Mapping[str, Any]) -> Shapes:
    yield "fc.weight", (HIDDEN, 2 * HIDDEN)
    yield "hidden_norm.weight", (HIDDEN,)
    yield "norm.weight", (HIDDEN,)
    for layer in range(config["num_hidden_layers"]):
        yield from block(f"layers.{layer}.", config)


def _mimo(config: Mapping[str, Any]) -> Shapes:
    yield from shapes(config)
    mtp = "model.mtp_layers.0."
    yield from block(mtp, config)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        yield f"{mtp}{name}.weight", (HIDDEN,)
    yield f"{mtp}input_proj.weight", (HIDDEN, 2 * HIDDEN)


def _experts(prefix: str, config: Mapping[str, Any]) -> Shapes:
    count, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    yield f"{prefix}gate.weight", (count, HIDDEN)
    yield f"{prefix}gate.e_score_correction_bias", (count,)
    for expert in (*(f"experts.{n}." for n in range(count)), "shared_experts."):
        yield f"{prefix}{expert}gate_proj.weight", (inner, HIDDEN)
        yield f"{prefix}{expert}up_proj.weight", (inner, HIDDEN)
        yield f"{prefix}{expert}down_proj.weight", (HIDDEN, inner)


def _with_next_layer(
    config: Mapping[str, Any], attention: Callable[[str, Mapping[str, Any]], Shapes]
) -> Shapes:
    """Yield a dense layer, one of experts, and one that predicts a further token."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "lm_head.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    inner = config["intermediate_size"]
    for part, shape in (
        ("gate", (inner, HIDDEN)),
        ("up", (inner, HIDDEN)),
        ("down", (HIDDEN, inner)),
    ):
        yield f"model.layers.0.mlp.{part}_proj.weight", shape
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        yield from attention(prefix, config)
        yield f"{prefix}input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}post_attention_layernorm.weight", (HIDDEN,)
        if layer:
            yield from _experts(f"{prefix}mlp.", config)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"model.layers.2.{name}.weight", (HIDDEN,)
    yield "model.layers.2.eh_proj.weight", (HIDDEN, 2 * HIDDEN)


def _grouped(prefix: str, config: Mapping[str, Any]) -> Shapes:
    for name, shape in block(prefix, {**config, "num_experts": 0}):
        if "self_attn" in name:
            yield name, shape


def _latent(prefix: str, config: Mapping[str, Any]) -> Shapes:
    heads = config["num_attention_heads"]
    attention = f"{prefix}self_attn."
    yield f"{attention}q_proj.weight", (heads * (_NOPE + _ROPE), HIDDEN)
    yield f"{attention}kv_a_proj_with_mqa.weight", (_LATENT + _ROPE, HIDDEN)
    yield f"{attention}kv_a_layernorm.weight", (_LATENT,)
    yield f"{attention}kv_b_proj.weight", (heads * (_NOPE + _VALUE), _LATENT)
    yield f"{attention}o_proj.weight", (HIDDEN, heads * _VALUE)


_MIMO = QWEN2 | {
    "architectures": ["MiMoForCausalLM"],
    "num_nextn_predict_layers": 1,
}
_EXPERTS = {
    "num_attention_heads": 2,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_GLM = (
    LLAMA
    | _EXPERTS
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_key_value_heads": 1,
        "attention_bias": True,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
    }
)
_DEEPSEEK = (
    LLAMA
    | _EXPERTS
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": _LATENT,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _VALUE,
        "head_dim": _ROPE,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
)
_ONE_LAYER = LLAMA | {"num_hidden_layers": 1}

PAIRS = {
    "draft model": Pair("draft_model", LLAMA, draft=_ONE_LAYER),
    "eagle": Pair("eagle", LLAMA, draft=_ONE_LAYER, draft_shapes=_eagle),
    "eagle with its own embedding": Pair("eagle", LLAMA, draft=_ONE_LAYER, draft_shapes=_eagle_own),
    "eagle3": Pair(
        "eagle3",
        LLAMA,
        draft=_ONE_LAYER
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        },
        draft_shapes=_eagle3,
        fixed=_eagle3_vocabulary,
    ),
    "medusa": Pair(
        "medusa",
        LLAMA,
        draft={
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "num_heads": 3,
            "num_hidden_layers": 1,
        },
        draft_shapes=_medusa,
        num_tokens=3,
    ),
    "dflash": Pair(
        "dflash",
        LLAMA,
        draft=LLAMA
        | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": 4,
            "layer_types": ["full_attention"] * 2,
            "dflash_config": {"mask_token_id": 511, "target_layer_ids": [0, 1]},
        },
        draft_shapes=_dflash,
        num_tokens=3,
    ),
    "mimo": Pair("mtp", _MIMO, verifier_shapes=_mimo, num_tokens=1),
    "glm": Pair(
        "mtp",
        _GLM,
        verifier_shapes=lambda config: _with_next_layer(config, _grouped),
        num_tokens=1,
        options={"dtype": "bfloat16"},
    ),
    "deepseek": Pair(
        "mtp",
        _DEEPSEEK,
        verifier_shapes=lambda config: _with_next_layer(config, _latent),
        num_tokens=1,
        options={"dtype": "bfloat16"},
    ),
}
