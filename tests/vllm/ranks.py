"""Two ranks of one vLLM, in processes that run many engines one after the other.

Started as `python -m tests.vllm.ranks RANK FOLDER PORT...`. Each rank runs the same comparison at
the same time, as vLLM's external launcher wants it: so what Python and vLLM take to start is paid
once, and each rank is watched from within. A rank reads a case per line, and tells what it saw.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.distributed.parallel_state import get_world_group
from weightsync_client import Fleet

from tests.vllm.checkpoints import Tensors
from tests.vllm.models import MODELS
from tests.vllm.plain import plain_weights
from tests.vllm.proof import Push, compare
from weightsync.core.types import CastPolicy

RANKS = 2
FEW = 5  # ranks that share a core take their time


def commit(llm: LLM) -> None:
    """Let vLLM commit, on this rank, the session that holds the verifier."""
    get_world_group().barrier()
    llm.start_weight_update()
    llm.update_weights({"update_info": {}})
    llm.finish_weight_update("new")


def pushing(rank: int, directory: Path) -> Push:
    """Return how this rank takes part in an update: the first one sends to all."""

    def push(llm: LLM, tensors: Tensors) -> None:
        if rank:
            commit(llm)
            return
        with (
            Fleet.from_vllm(directory) as fleet,
            fleet.update(version="new", cast=CastPolicy.ALLOW) as session,
        ):
            session.push(tensors)
            session.finish(lambda _session_ids: commit(llm))

    return push


def results(rank: int, folder: Path, ports: Sequence[str], cases: Iterator[Any]) -> Iterator[Any]:
    """Run cases, and yield what was seen in each."""
    free = iter(ports)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for number, (model, dtype, weights) in enumerate(cases):
        place = folder / str(number)
        how: AbstractContextManager[None] = plain_weights() if weights == "plain" else nullcontext()
        with how:
            comparison = compare(
                MODELS[model],
                place / str(rank),
                pushing(rank, place),
                starting=lambda: os.environ.update(MASTER_PORT=next(free)),
                num_tokens=FEW,
                dtype=dtype,
                tensor_parallel_size=RANKS,
                distributed_executor_backend="external_launcher",
                additional_config={"weightsync": {"directory": str(place)}},
            )
        yield asdict(comparison)


def main() -> None:
    """Answer until there are no more cases; vLLM's own words go elsewhere."""
    rank, folder, *ports = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    cases = map(json.loads, sys.stdin)
    for result in results(int(rank), Path(folder), ports, cases):
        answers.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
