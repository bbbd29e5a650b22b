from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.vllm.engine import push
from tests.vllm.models import MODELS
from tests.vllm.proof import compare
from weightsync.core.types import CastPolicy

DTYPES = ("float32", "bfloat16")
# Checkpoints are in 32 bits. Packed, vLLM's own way on the CPU, nearly every module holds another
# form; plain, as on other devices, only those of experts and heads do.
CASES = [
    *((model, dtype, "packed") for model in MODELS for dtype in DTYPES),
    *(
        (model, dtype, "plain")
        for model in ("llama", "llama tied", "qwen2", "qwen3 moe", "idefics3")
        for dtype in DTYPES
    ),
]


@pytest.mark.parametrize(("model", "dtype", "weights"), CASES, indirect=["weights"])
def test_an_update_is_as_good_as_a_fresh_start(
    tmp_path: Path, model: str, dtype: str, weights: str
) -> None:
    """Tokens and logits after an update are a fresh engine's, bit for bit, and old ones go back."""
    send = partial(push, version="new", cast=CastPolicy.ALLOW)
    compare(MODELS[model], tmp_path, send, dtype=dtype).check()
