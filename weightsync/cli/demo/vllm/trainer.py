"""The trainer: tells the story, push by push, and waits after each until vLLM was observed."""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from weightsync_client import Fleet, push_model, verify

from weightsync.cli.demo.events import Pushed, Saved, Trained, Verified
from weightsync.cli.demo.lesson import Lesson
from weightsync.cli.demo.models import BORROWED, llama
from weightsync.cli.demo.text import Exercise, capitals, plain
from weightsync.cli.demo.vllm.eagle import Eagle, save_pair
from weightsync.cli.demo.vllm.plan import StoryPlan
from weightsync.core.types import Target

BOTH = (Target.VERIFIER, Target.DRAFT)


def run(connection: Connection, plan: StoryPlan) -> None:
    """Train a pair, push it into vLLM in every way, and compare what vLLM holds with it."""
    story = Trainer(connection, plan)
    with tempfile.TemporaryDirectory() as folder:
        story.train(plan.first_steps, BOTH, plain)
        story.train(plan.draft_steps, (Target.DRAFT,), plain)
        story.save(Path(folder) / "first")
        with Fleet.from_vllm(connection.recv().address, timeout=plan.patience) as fleet:
            connection.recv()
            story.train(plan.verifier_steps, (Target.VERIFIER,), capitals)
            story.push(fleet, (Target.VERIFIER,))
            story.train(plan.draft_steps, (Target.DRAFT,), capitals)
            story.push(fleet, (Target.DRAFT,))
            for _ in range(plan.rounds):
                story.train(plan.round_steps, BOTH, plain)
                story.train(plan.round_steps, (Target.DRAFT,), plain)
                story.push(fleet, BOTH)
            story.compare(fleet)
        story.save(Path(folder) / "last")
        # vLLM reads the folder until then.
        connection.recv()


class Trainer:
    """A pair of models that learns, and tells of it."""

    def __init__(self, connection: Connection, plan: StoryPlan) -> None:
        """Begin with random weights."""
        torch.manual_seed(plan.seed)
        self._verifier = llama(plan.hidden, plan.verifier_layers)
        self._draft = Eagle(self._verifier)
        self._lesson = Lesson(self._verifier, self._draft, plan)
        self._connection = connection
        self._step = 0

    def train(self, steps: int, targets: tuple[Target, ...], exercise: Exercise) -> None:
        """Let one or both learn something."""
        for _ in range(steps):
            self._step += 1
            losses = self._lesson.step(targets, exercise)
            self._connection.send(Trained(time.time(), self._step, *losses))

    def save(self, folder: Path) -> None:
        """Write checkpoints of both."""
        save_pair(self._verifier, self._draft, folder)
        self._connection.send(Saved(str(folder), f"step-{self._step}"))

    def push(self, fleet: Fleet, targets: tuple[Target, ...]) -> None:
        """Push some of the models in one session, and wait until vLLM was observed."""
        version = f"step-{self._step}"
        sources = self._sources()
        report = push_model(
            fleet,
            *(sources[target] if target in targets else None for target in BOTH),
            version=version,
        )
        (worker,) = report.workers
        held = fleet.workers[0].info().targets
        self._connection.send(
            Pushed(
                time.time(),
                version,
                report.sent_bytes,
                report.sent_tensors,
                report.seconds,
                worker.commit.pause_seconds if worker.commit else 0.0,
                {status.target: status.weight_version for status in held},
            )
        )
        self._connection.recv()

    def compare(self, fleet: Fleet) -> None:
        """Compare both models with vLLM's, bit for bit."""
        sources = self._sources()
        # VLLM lends the draft the verifier's; it has to hold them as well.
        borrowed = {name: self._verifier.state_dict()[name] for name in BORROWED}
        reports = (
            verify(fleet, sources[Target.VERIFIER], target=Target.VERIFIER),
            verify(fleet, sources[Target.DRAFT] | borrowed, target=Target.DRAFT),
        )
        found = [str(d) for report in reports for d in report.differences]
        found += [f"not compared: {name}" for report in reports for name in report.not_compared]
        self._connection.send(Verified(sum(report.compared for report in reports), tuple(found)))

    def _sources(self) -> dict[Target, dict[str, torch.Tensor]]:
        return {Target.VERIFIER: self._verifier.state_dict(), Target.DRAFT: self._draft.tensors()}
