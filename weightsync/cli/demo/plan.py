"""How long the demo runs and how large its models are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large models, batches and texts are.

    Attributes:
        hidden: Width of both models.
        verifier_layers: Layers of the verifier; the draft has one.
        batch_size: Pieces of text per step.
        sample_tokens: Tokens that the worker generates for a prompt.
        seed: Of weights, batches and prompts.
    """

    hidden: int = 128
    verifier_layers: int = 4
    batch_size: int = 8
    sample_tokens: int = 48
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Plan(Sizes):
    """What the processes are told.

    Attributes beyond `Sizes`:
        seconds: Time for training; None: `steps` decide.
        steps: Steps of training; None: `seconds` decide.
        push_every: Steps between two pushes.
        left_behind_after: Number of pushes after which a copy of the draft gets no updates.
        final_samples: Generations per draft for the last measurement.
    """

    seconds: float | None = 75.0
    steps: int | None = None
    push_every: int = 10
    left_behind_after: int = 3
    final_samples: int = 8

    def over(self, step: int, seconds: float) -> bool:
        """Tell whether training ends after a step that ended `seconds` after the start."""
        if self.steps is not None:
            return step >= self.steps
        return self.seconds is not None and seconds >= self.seconds

    @property
    def patience(self) -> float:
        """Seconds after which the whole demo gives up; many times what it should take."""
        return 240.0 + 4 * (self.seconds or 0.0) + 2.0 * (self.steps or 0)


QUICK = Plan(
    seconds=None,
    steps=120,
    push_every=10,
    left_behind_after=2,
    verifier_layers=2,
    batch_size=4,
    sample_tokens=24,
    final_samples=12,
)
"""Enough to see that all works."""
