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
        draft_steps: Steps in which the draft alone learns to follow.
        rounds: Number of pushes of both, on the way back.
        round_steps: Steps of both before each of those.
        num_proposed: Tokens that the draft proposes at a time.
        num_prompts: Prompts on which the acceptance is measured.
    """

    log: Path = Path("vllm.log")
    first_steps: int = 400
    verifier_steps: int = 80
    draft_steps: int = 60
    rounds: int = 4
    round_steps: int = 25
    num_proposed: int = 3
    num_prompts: int = 16

    @property
    def patience(self) -> float:
        """Seconds after which the whole demo gives up; many times what it should take."""
        steps = self.first_steps + self.verifier_steps + self.draft_steps
        return 600.0 + 4.0 * (steps + self.rounds * self.round_steps)


QUICK = StoryPlan(
    verifier_layers=2,
    batch_size=4,
    sample_tokens=32,
    first_steps=120,
    verifier_steps=60,
    draft_steps=60,
    rounds=2,
    num_prompts=8,
)
"""Enough to see that all works."""
