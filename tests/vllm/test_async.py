from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from weightsync_client import Fleet, push_model

from tests.vllm.drafts import PAIRS, Made
from tests.vllm.engine import PROMPTS, SMALL, generate, running
from weightsync.integrations.vllm.clients import AsyncLLMClient

SHORT = 8
LONG = 100


@asynccontextmanager
async def engine_of(made: Made) -> AsyncIterator[AsyncLLM]:
    """Run an engine in a process of its own."""
    args: dict[str, Any] = SMALL | made.options | {"enable_prefix_caching": True, "block_size": 32}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(made.verifier), **args))
    try:
        yield engine
    finally:
        engine.shutdown()


async def tokens(engine: AsyncLLM, num_tokens: int) -> list[list[int]]:
    """Return the greedy tokens that follow the prompts, asked for at once."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)

    async def one(index: int, prompt: list[int]) -> list[int]:
        asked = {"prompt_token_ids": prompt}
        found: list[int] = []
        async for output in engine.generate(asked, params, f"{index}-{num_tokens}-{id(params)}"):
            found = list(output.outputs[0].token_ids)
        return found

    return list(await asyncio.gather(*(one(i, p) for i, p in enumerate(PROMPTS))))


async def disturbed(
    engine: AsyncLLM, asked: Callable[[], Awaitable[Any]], update: Callable[[], object]
) -> Any:
    """Return what was asked for, with updates by another thread from start to end."""
    done, begun = threading.Event(), threading.Event()

    def trainer() -> None:
        try:
            while not done.is_set():
                update()
                begun.set()
        finally:
            begun.set()

    thread = asyncio.create_task(asyncio.to_thread(trainer))
    try:
        await asyncio.to_thread(begun.wait)
        return await asked()
    finally:
        done.set()
        await thread


def test_an_async_engine_is_updated_with_requests_in_flight(tmp_path: Path) -> None:
    """Commits of verifier, draft and both in the middle of requests fail none, and mix nothing."""
    old, new = (PAIRS["eagle"].make(tmp_path / str(seed), seed) for seed in (1, 2))

    async def main() -> list[list[int]]:
        async with engine_of(old) as engine:
            client = AsyncLLMClient(engine, asyncio.get_running_loop())
            fleet = await asyncio.to_thread(Fleet.from_vllm, client)
            with fleet:
                undisturbed = await tokens(engine, LONG)
                # Equal weights, so that no token may change.
                same: dict[str, Any] = {"model": None, "draft": None, "version": "same"}
                for given in (
                    {"model": old.verifier_tensors},
                    {"draft": old.draft_tensors},
                    {"model": old.verifier_tensors, "draft": old.draft_tensors},
                ):
                    update = same | given
                    seen = await disturbed(
                        engine, lambda: tokens(engine, LONG), partial(push_model, fleet, **update)
                    )
                    assert seen == undisturbed
                assert await engine.get_weight_version() == "same"

                await asyncio.to_thread(push_model, fleet, new.verifier_tensors, version="new")
                await asyncio.to_thread(push_model, fleet, None, new.draft_tensors, version="draft")
                assert await engine.get_weight_version() == "new"
                return await tokens(engine, SHORT)

    after = asyncio.run(main())
    with running(new.verifier, **new.options) as llm:
        assert generate(llm, num_tokens=SHORT) == after
