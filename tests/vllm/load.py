"""Requests that come and go without a pause, and the same ones again with nothing else going on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams

from tests.vllm.engine import worker_of
from tests.vllm.proof import digest, noted, watching

IN_FLIGHT = 4

Marks = tuple[str, ...]
"""Which versions of verifier and draft are live."""


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Attributes:
        marks: Of the versions that it ran with.
        logits: As in `Seen`, of this step.
        proposals: Likewise.
    """

    marks: Marks
    logits: Sequence[str]
    proposals: Sequence[Any]


@dataclass
class Run:
    """A run of requests.

    Attributes:
        steps: Each step, in order.
        answers: Tokens of each request and why it ended, by its number.
        stopped: Before which step the last requests had come.
    """

    steps: list[Step] = field(default_factory=list)
    answers: dict[str, tuple[list[int], str | None]] = field(default_factory=dict)
    stopped: int = 0


def run(llm: LLM, before: Callable[[int], bool]) -> Run:
    """Keep requests of many lengths in flight, and let the last ones end.

    Args:
        llm: With a worker in this process.
        before: Called before each step with its number; tells whether further requests come.
    """
    engine, worker, made = llm.llm_engine, worker_of(llm), Run()
    live: list[Marks] = []
    coming, number = True, 0
    # Noted within the step, where no commit can take place.
    note_marks = noted(worker.model_runner, "execute_model", lambda _: marks(worker), live)
    with watching(llm) as (logits, proposals), note_marks:
        while coming or engine.has_unfinished_requests():
            more = before(len(made.steps))
            if coming and not more:
                coming, made.stopped = False, len(made.steps)
                continue
            while coming and engine.get_num_unfinished_requests() < IN_FLIGHT:
                engine.add_request(str(number), *request(number))
                number += 1
            seen = len(logits), len(proposals)
            for output in engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    made.answers[output.request_id] = list(answer.token_ids), answer.finish_reason
            made.steps.append(Step(live[-1], logits[seen[0] :], proposals[seen[1] :]))
    return made


def request(number: int) -> tuple[Any, SamplingParams]:
    """Return a prompt and how it is to be answered: different for each number."""
    prompt = [3 + (31 * number + 7 * i) % 490 for i in range(1 + number % 7)]
    length = 1 + 13 * number % 40
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    return {"prompt_token_ids": prompt}, params


def marks(worker: Any) -> Marks:
    """Return digests of one small tensor of each model, which differs between versions."""
    models = (worker.get_model(), worker.get_draft_model())
    return tuple(
        digest(next(p for p in model.parameters() if p.ndim == 1 and p.numel()))
        for model in models
        if model is not None
    )
