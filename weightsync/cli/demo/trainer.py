"""The trainer: teaches the verifier a text, and the draft what the verifier would say."""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from transformers import LlamaForCausalLM
from weightsync_client import Fleet, push_model, verify

from weightsync.cli.demo.events import Pushed, Saved, Trained, Verified
from weightsync.cli.demo.lesson import Lesson, Standalone
from weightsync.cli.demo.models import make_pair, save_pair
from weightsync.cli.demo.plan import Plan
from weightsync.core.types import Target


def run(connection: Connection, plan: Plan) -> None:
    """Train and push until the plan is over, then compare the worker's weights with these."""
    verifier, draft = make_pair(plan)
    with tempfile.TemporaryDirectory() as folder:
        save_pair(verifier, draft, Path(folder))
        connection.send(Saved(folder, "random"))
        address = connection.recv().address
    lesson = Lesson(verifier, Standalone(draft), plan)
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
        worker.weight_versions,
    )


def _compare(fleet: Fleet, verifier: LlamaForCausalLM, draft: LlamaForCausalLM) -> Verified:
    reports = (
        verify(fleet, verifier, target=Target.VERIFIER),
        verify(fleet, draft, target=Target.DRAFT),
    )
    found = [str(d) for report in reports for d in report.differences]
    found += [f"not compared: {name}" for report in reports for name in report.not_compared]
    return Verified(sum(report.compared for report in reports), tuple(found))
