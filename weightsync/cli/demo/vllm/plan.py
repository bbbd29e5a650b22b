"""How long each part of the story is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightsync.cli.demo.plan import Sizes


@dataclass(frozen=True, slots=True)
class StoryPlan(Sizes):
    """What the processes are told.

    Attributes beyond `Sizes`:
        log: Where vLLM writes what it has to say.
        first_steps: Steps of both models before vLLM starts.
        verifier_steps: Steps in which the verifier alone learns something else.
        draft_steps: Steps in which the draft alone catches up, before vLLM starts and after that.
        rounds: Number of pushes of both, on the way back.
        round_steps: Steps of both before each of those, and then as many of the draft alone.
        num_proposed: Tokens that the draft proposes at a time.
        num_prompts: Prompts on which the acceptance is measured.
    """

    sample_tokens: int = 24
    log: Path = Path("vllm.log")
    first_steps: int = 300
    verifier_steps: int = 120
    draft_steps: int = 60
    rounds: int = 3
    round_steps: int = 25
    num_proposed: int = 3
    num_prompts: int = 32

    @property
    def patience(self) -> float:
        """Seconds after which the whole demo gives up; many times what it should take."""
        steps = self.first_steps + self.verifier_steps + 2 * self.draft_steps
        return 600.0 + 4.0 * (steps + 2 * self.rounds * self.round_steps)


QUICK = StoryPlan(
    verifier_layers=2,
    batch_size=4,
    first_steps=100,
    verifier_steps=60,
    draft_steps=40,
    rounds=2,
    num_prompts=16,
)
"""Enough to see that all works."""
