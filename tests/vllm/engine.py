"""A vLLM in this process, and what is asked of it."""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from weightsync_client import Fleet

Prompt: TypeAlias = Sequence[int] | Mapping[str, Any]
"""Tokens, or what vLLM takes as a prompt."""

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
        _spare_collections()


@functools.cache
def _spare_collections() -> None:
    """Take what is imported by now out of garbage collections.

    vLLM makes nine of them for each engine, which is most of the time that it takes to start and
    stop; and it would put everything back in.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.freeze = gc.unfreeze = lambda: None


def generate(
    llm: LLM, prompts: Sequence[Prompt] = PROMPTS, num_tokens: int = 16
) -> list[list[int]]:
    """Return the greedy tokens that follow some prompts."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    asked: list[Any] = [
        prompt if isinstance(prompt, Mapping) else {"prompt_token_ids": list(prompt)}
        for prompt in prompts
    ]
    return [list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False)]


def worker_of(llm: LLM) -> Any:
    """Return vLLM's worker, which lives in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def address_of(llm: LLM) -> str:
    """Return where the service in the worker listens."""
    return str(worker_of(llm).weight_transfer_engine.server.address)


def push(llm: LLM, tensors: Mapping[str, torch.Tensor], version: str, **options: Any) -> None:
    """Send tensors to the worker of this process, and commit them."""
    with Fleet([address_of(llm)]) as fleet, fleet.update(version=version, **options) as session:
        session.push(tensors)
        session.finish()
