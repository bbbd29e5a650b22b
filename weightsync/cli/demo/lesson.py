"""Steps of training: the verifier learns a text, the draft what the verifier would say."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from weightsync.cli.demo.models import BORROWED
from weightsync.cli.demo.plan import Sizes
from weightsync.cli.demo.text import VOCAB_SIZE, Exercise, batch, corpus, plain
from weightsync.core.types import Target

_LEARNING_RATE = 3e-3
_BETAS = (0.9, 0.95)
_WARMUP_STEPS = 20
_LENGTH = 128


class Pupil(Protocol):
    """A draft, as it learns."""

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """Yield what is the draft's own to train."""
        ...

    def guesses(
        self, tokens: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the draft's logits, and the verifier's for the same tokens, both (..., vocab).

        Args:
            tokens: int64, (size, length).
            hidden: The verifier's last hidden states, (size, length, hidden).
            logits: The verifier's, (size, length, vocab).
        """
        ...


class Standalone:
    """A draft that is a model of its own, but for what it borrows."""

    def __init__(self, draft: LlamaForCausalLM) -> None:
        """Teach this model."""
        self._draft = draft

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """Yield all parameters but those that are the verifier's to train."""
        return [p for name, p in self._draft.named_parameters() if name not in BORROWED]

    def guesses(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,  # noqa: ARG002 - it sees the tokens only
        logits: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what both say for all positions but the last."""
        return self._draft(input_ids=tokens, use_cache=False).logits[:, :-1], logits[:, :-1]


class Lesson:
    """Steps of training for a verifier and its draft, on the same text."""

    def __init__(self, verifier: LlamaForCausalLM, draft: Pupil, plan: Sizes) -> None:
        """Begin."""
        self._verifier = verifier
        self._draft = draft
        self._parameters = {
            Target.VERIFIER: list(verifier.parameters()),
            Target.DRAFT: list(draft.parameters()),
        }
        self._optimizers = {
            target: torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=_BETAS)
            for target, parameters in self._parameters.items()
        }
        self._schedules = {
            target: torch.optim.lr_scheduler.LinearLR(
                optimizer, start_factor=1 / _WARMUP_STEPS, total_iters=_WARMUP_STEPS
            )
            for target, optimizer in self._optimizers.items()
        }
        self._text = corpus()
        self._batch_size = plan.batch_size
        self._generator = torch.Generator().manual_seed(plan.seed)

    def step(
        self, targets: Collection[Target] = tuple(Target), exercise: Exercise = plain
    ) -> tuple[float, float]:
        """Make a step and return the losses of verifier and draft, in nats per byte.

        Args:
            targets: Who learns; the other one stays as it is.
            exercise: What is to be learned from a piece of text.
        """
        tokens, answers = exercise(
            batch(self._text, self._batch_size, _LENGTH, self._generator), self._generator
        )
        hidden = self._verifier.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = self._verifier.lm_head(hidden)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), answers.flatten())
        # Distillation: the draft's distribution shall be the verifier's.
        told, wanted = self._draft.guesses(tokens, hidden.detach(), logits.detach())
        draft_loss = functional.kl_div(
            told.reshape(-1, VOCAB_SIZE).log_softmax(-1),
            wanted.reshape(-1, VOCAB_SIZE).log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        )
        losses = {Target.VERIFIER: loss, Target.DRAFT: draft_loss}
        for target in targets:
            self._set_gradients(losses[target], target)
        for target in targets:
            self._optimizers[target].step()
            self._schedules[target].step()
        return loss.item(), draft_loss.item()

    def _set_gradients(self, loss: torch.Tensor, target: Target) -> None:
        # `backward` would reach what the draft borrows, too.
        parameters = self._parameters[target]
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if target is Target.VERIFIER:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
