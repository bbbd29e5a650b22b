from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from weightsync_client import Fleet, push_model

from tests.vllm import checkpoints
from tests.vllm.engine import PROMPTS, SMALL, generate, running
from weightsync.integrations.vllm.clients import AsyncLLMClient

UPDATES = 10

BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Of these a rank holds columns, of other matrices rows; of vectors all."""

Tokens = tuple[int, ...]


def same_norms(new: checkpoints.Tensors, old: checkpoints.Tensors) -> checkpoints.Tensors:
    """Return new weights with the old vectors, which every rank holds whole."""
    return {name: old[name] if tensor.ndim == 1 else tensor for name, tensor in new.items()}


def skewed(first: checkpoints.Tensors, second: checkpoints.Tensors) -> checkpoints.Tensors:
    """Return what two ranks compute with if one has the first weights and one the second."""

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 1:
            return tensor
        axis = 1 if name.endswith(BY_COLUMNS) else 0
        return torch.cat([tensor.chunk(2, axis)[0], second[name].chunk(2, axis)[1]], axis)

    return {name: one(name, tensor) for name, tensor in first.items()}


@asynccontextmanager
async def two_ranks(model: Path) -> AsyncIterator[AsyncLLM]:
    """Run an engine of two ranks, each with its half of the model."""
    args = AsyncEngineArgs(model=str(model), tensor_parallel_size=2, **SMALL)
    engine = AsyncLLM.from_engine_args(args)
    try:
        yield engine
    finally:
        engine.shutdown()


async def one_step(engine: AsyncLLM, name: str) -> Tokens:
    """Return the next token of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    async def one(index: int, prompt: list[int]) -> int:
        found = -1
        asked = {"prompt_token_ids": prompt}
        async for output in engine.generate(asked, params, f"{name}-{index}"):
            found = output.outputs[0].token_ids[0]
        return found

    return tuple(await asyncio.gather(*(one(i, p) for i, p in enumerate(PROMPTS))))


def test_ranks_switch_at_the_same_step(
    llama: Path, new: checkpoints.Tensors, tmp_path: Path
) -> None:
    """Under load each token is one version's on both ranks; half of each gives other tokens."""
    old = checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 1)
    new = same_norms(new, old)

    async def main() -> tuple[Tokens, Tokens, list[Tokens]]:
        async with two_ranks(llama) as engine:
            client = AsyncLLMClient(engine, asyncio.get_running_loop())
            with await asyncio.to_thread(Fleet.from_vllm, client) as fleet:
                before = await one_step(engine, "before")
                await asyncio.to_thread(push_model, fleet, new, version="new")
                after = await one_step(engine, "after")

                def trainer() -> None:
                    versions = zip(itertools.cycle((old, new)), range(UPDATES), strict=False)
                    for tensors, count in versions:
                        push_model(fleet, tensors, version=f"v{count}")

                updating = asyncio.create_task(asyncio.to_thread(trainer))
                seen: list[Tokens] = []
                while not updating.done():
                    seen.append(await one_step(engine, f"step-{len(seen)}"))
                await updating
                return before, after, seen

    before, after, seen = asyncio.run(main())
    assert len(seen) > UPDATES
    allowed = [set(pair) for pair in zip(before, after, strict=True)]
    assert all(one in pair for tokens in seen for one, pair in zip(tokens, allowed, strict=True))

    # A step with one rank behind, or ahead, would have been noticed.
    for name, halves in (("behind", (new, old)), ("ahead", (old, new))):
        folder = checkpoints.write(tmp_path / name, checkpoints.LLAMA, skewed(*halves))
        with running(folder) as llm:
            mixed = [one for (one,) in generate(llm, num_tokens=1)]
        assert any(one not in pair for one, pair in zip(mixed, allowed, strict=True))
