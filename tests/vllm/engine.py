"""A vLLM in this process, and what is asked of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [100, 200, 300, 400, 411]]

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "seed": 0,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 32 << 20,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "weight_transfer_config": {"backend": "weightsync"},
}


@contextmanager
def running(model: Path, **options: Any) -> Iterator[LLM]:
    """Run a vLLM with the service in it; several may follow each other in one process."""
    llm = LLM(model=str(model), **(SMALL | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS, num_tokens: int = 16
) -> list[list[int]]:
    """Return the greedy tokens that follow some prompts."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False)]


def worker_of(llm: LLM) -> Any:
    """Return vLLM's worker, which lives in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def address_of(llm: LLM) -> str:
    """Return where the service in the worker listens."""
    return str(worker_of(llm).weight_transfer_engine.server.address)
