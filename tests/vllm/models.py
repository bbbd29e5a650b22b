"""The models on which an update is compared with a fresh start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm import checkpoints, computing, pictures
from tests.vllm.checkpoints import LLAMA, QWEN2, QWEN3, QWEN3_MOE, Shapes, Tensors
from tests.vllm.drafts import PAIRS
from tests.vllm.engine import PROMPTS, Prompt


@dataclass(frozen=True)
class Model:
    """A verifier alone.

    Attributes:
        config: As in its checkpoint.
        shapes: Its tensors.
        prompts: What it is asked.
        options: What vLLM must be told.
        files: Writes what its checkpoint has beside config and weights.
    """

    config: Mapping[str, Any]
    shapes: Callable[[Mapping[str, Any]], Shapes] = checkpoints.shapes
    prompts: Callable[[], Sequence[Prompt]] = lambda: PROMPTS
    options: Mapping[str, Any] = field(default_factory=dict)
    files: Callable[[Path], None] = lambda _folder: None

    def tensors(self, seed: int) -> Tensors:
        """Return random weights, in 32 bits."""
        return checkpoints.values(self.shapes(self.config), seed)

    def write(self, folder: Path, tensors: Tensors) -> Path:
        """Write a checkpoint and return its folder."""
        checkpoints.write(folder, self.config, tensors)
        self.files(folder)
        return folder


_TIED = {"tie_word_embeddings": True}
_ODD = {"vocab_size": 500}

MODELS = {
    "llama": Model(LLAMA),
    "llama tied": Model(LLAMA | _TIED),
    "llama odd vocabulary": Model(LLAMA | _ODD),
    "llama odd vocabulary tied": Model(LLAMA | _ODD | _TIED),
    "qwen2": Model(QWEN2),
    "qwen3": Model(QWEN3),
    "qwen3 tied": Model(QWEN3 | _TIED),
    "qwen3 moe": Model(QWEN3_MOE),
    "llama that computes": Model(computing.COMPUTING, computing.shapes),
    # Without speculation: what predicts a further token is in the checkpoint, and not used.
    "deepseek": Model(PAIRS["deepseek"].verifier, PAIRS["deepseek"].verifier_shapes),
    "idefics3": Model(
        pictures.CONFIG,
        pictures.shapes,
        pictures.prompts,
        {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}},
        pictures.write_processor,
    ),
}
