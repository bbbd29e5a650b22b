"""vLLM: generates all the time, whatever is pushed into it, and is observed after each push."""

from __future__ import annotations

import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weightsync.cli.demo.events import Listening, Observed, Saved
from weightsync.cli.demo.text import corpus, prompt, readable
from weightsync.cli.demo.vllm.plan import StoryPlan

if TYPE_CHECKING:
    from vllm import LLM

_PROMPT_TOKENS = 24
_SAMPLE = 0
"""Which of the prompts is shown."""


def run(connection: Connection, plan: StoryPlan) -> None:
    """Serve the first checkpoints while they are trained on; at the end load the last ones."""
    _prepare(plan.log)
    # Takes its time, while the trainer is busy.
    from weightsync.cli.demo.vllm.engine import running

    observer = Observer(plan)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        with running(_folder(connection.recv()), plan, place / "first") as llm:
            connection.send(Listening(str(place / "first"), ""))
            event: object = None
            while not isinstance(event, Saved):
                connection.send(observer.observe(llm))
                while not connection.poll():
                    observer.serve(llm)
                event = connection.recv()
        with running(_folder(event), plan, place / "last") as llm:
            connection.send(observer.observe(llm))


def _folder(saved: Saved) -> Path:
    return Path(saved.folder)


def _prepare(log: Path) -> None:
    """Set what vLLM reads when it is imported, and let all that it says go into a file."""
    os.environ |= {
        # This process is the engine's and the worker's.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as file:
        # Also what is written by other languages than Python.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class Observer:
    """Asks vLLM the same prompts again and again."""

    def __init__(self, plan: StoryPlan) -> None:
        """Choose the prompts."""
        generator = torch.Generator().manual_seed(plan.seed)
        text = corpus()
        self._prompts = [prompt(text, _PROMPT_TOKENS, generator) for _ in range(plan.num_prompts)]
        self._num_tokens = plan.sample_tokens
        self._served = 0

    def serve(self, llm: LLM) -> None:
        """Generate, for users who do not know of any push."""
        from weightsync.cli.demo.vllm.engine import generate

        self._served += len(generate(llm, self._prompts, self._num_tokens))

    def observe(self, llm: LLM) -> Observed:
        """Tell what vLLM says now, and how much of what the draft proposes is accepted."""
        from weightsync.cli.demo.vllm.engine import Counts, generate

        before = Counts.read(llm)
        tokens = generate(llm, self._prompts, self._num_tokens)
        counts = Counts.read(llm).since(before)
        return Observed(
            time.time(),
            tokens,
            readable(self._prompts[_SAMPLE]),
            readable(list(tokens[_SAMPLE])),
            counts.proposals,
            counts.proposed,
            counts.by_position,
            self._served,
        )
