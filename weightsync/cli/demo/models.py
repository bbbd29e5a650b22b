"""A small verifier and a smaller draft, which has neither an embedding nor a head of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from weightsync.cli.demo.plan import Sizes
from weightsync.cli.demo.text import VOCAB_SIZE
from weightsync.loader import share_identical_weights

BORROWED = ("model.embed_tokens.weight", "lm_head.weight")
"""What the draft holds together with the verifier."""


def make_pair(plan: Sizes) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return a verifier and a draft with random weights, float32, embedding and head shared."""
    torch.manual_seed(plan.seed)
    verifier, draft = llama(plan.hidden, plan.verifier_layers), llama(plan.hidden, 1)
    share_identical_weights(verifier, draft, missing=BORROWED)
    return verifier, draft


def save_pair(verifier: LlamaForCausalLM, draft: LlamaForCausalLM, folder: Path) -> None:
    """Write two checkpoint folders, `verifier` and `draft`; the draft's without what it borrows."""
    verifier.save_pretrained(folder / "verifier")
    own = {name: value for name, value in draft.state_dict().items() if name not in BORROWED}
    draft.save_pretrained(folder / "draft", state_dict=own)


def left_behind(verifier: PreTrainedModel, draft: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a draft that keeps its layers, and holds the verifier's embedding and head.

    So it is in engines that push the verifier only: what is shared changes, the rest stays behind.
    """
    copy = type(draft)(draft.config)
    copy.load_state_dict(draft.state_dict())
    share_identical_weights(verifier, copy)
    copy.train(mode=False)
    return copy


def llama(hidden: int, layers: int) -> LlamaForCausalLM:
    """Return a model with random weights, float32, for bytes as tokens."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        # All bytes are text: none of them ends it.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
