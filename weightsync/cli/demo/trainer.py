"""The trainer: teaches the verifier a text, and the draft what the verifier would say."""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM
from weightsync_client import Fleet, push_model, verify

from weightsync.cli.demo.events import Pushed, Saved, Trained, Verified
from weightsync.cli.demo.models import BORROWED, make_pair, save_pair
from weightsync.cli.demo.plan import Plan
from weightsync.cli.demo.text import VOCAB_SIZE, batch, corpus
from weightsync.core.types import Target

_LEARNING_RATE = 3e-3
_BETAS = (0.9, 0.95)
_WARMUP_STEPS = 20
_LENGTH = 128


def run(connection: Connection, plan: Plan) -> None:
    """Train and push until the plan is over, then compare the worker's weights with these."""
    verifier, draft = make_pair(plan)
    with tempfile.TemporaryDirectory() as folder:
        save_pair(verifier, draft, Path(folder))
        connection.send(Saved(folder))
        address = connection.recv().address
    lesson = Lesson(verifier, draft, plan)
    start = time.monotonic()
    with Fleet([address]) as fleet:
        step, over = 0, False
        while not over:
            step += 1
            loss, draft_loss = lesson.step()
            connection.send(Trained(time.time(), step, loss, draft_loss))
            over = plan.over(step, time.monotonic() - start)
            if over or step % plan.push_every == 0:
                connection.send(_push(fleet, verifier, draft, f"step-{step}"))
        connection.send(_compare(fleet, verifier, draft))


def _push(
    fleet: Fleet, verifier: LlamaForCausalLM, draft: LlamaForCausalLM, version: str
) -> Pushed:
    """Make both models live together; what they share travels once."""
    report = push_model(fleet, verifier, draft, version=version)
    (worker,) = report.workers
    return Pushed(
        time.time(),
        version,
        report.sent_bytes,
        report.sent_tensors,
        report.seconds,
        worker.commit.pause_seconds if worker.commit else 0.0,
    )


def _compare(fleet: Fleet, verifier: LlamaForCausalLM, draft: LlamaForCausalLM) -> Verified:
    reports = (
        verify(fleet, verifier, target=Target.VERIFIER),
        verify(fleet, draft, target=Target.DRAFT),
    )
    found = [str(d) for report in reports for d in report.differences]
    found += [f"not compared: {name}" for report in reports for name in report.not_compared]
    return Verified(sum(report.compared for report in reports), tuple(found))


class Lesson:
    """Steps of training for both models, on the same text."""

    def __init__(self, verifier: LlamaForCausalLM, draft: LlamaForCausalLM, plan: Plan) -> None:
        """Begin."""
        self._models = verifier, draft
        # What the draft borrows is the verifier's to train.
        self._own = [p for name, p in draft.named_parameters() if name not in BORROWED]
        self._optimizers = [
            torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=_BETAS)
            for parameters in (verifier.parameters(), self._own)
        ]
        self._schedules = [
            torch.optim.lr_scheduler.LinearLR(
                optimizer, start_factor=1 / _WARMUP_STEPS, total_iters=_WARMUP_STEPS
            )
            for optimizer in self._optimizers
        ]
        self._text = corpus()
        self._batch_size = plan.batch_size
        self._generator = torch.Generator().manual_seed(plan.seed)

    def step(self) -> tuple[float, float]:
        """Make a step and return both losses, in nats per byte."""
        verifier, draft = self._models
        tokens = batch(self._text, self._batch_size, _LENGTH, self._generator)
        logits = verifier(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
        parameters = list(verifier.parameters())
        _set_gradients(loss, parameters)
        # Distillation: the draft's distribution shall be the verifier's.
        wanted = logits.detach().log_softmax(-1)
        told = draft(input_ids=tokens, use_cache=False).logits[:, :-1].reshape(-1, VOCAB_SIZE)
        draft_loss = functional.kl_div(
            told.log_softmax(-1), wanted, log_target=True, reduction="batchmean"
        )
        _set_gradients(draft_loss, self._own)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
        return loss.item(), draft_loss.item()


def _set_gradients(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    # `backward` would reach what the draft borrows, too.
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
