from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from weightsync_client import Fleet

from tests.vllm.drafts import PAIRS, Made
from tests.vllm.engine import address_of, running, worker_of
from tests.vllm.load import marks, run
from weightsync.core.types import CastPolicy, Target

UPDATES = 100
BOTH = (Target.VERIFIER, Target.DRAFT)


@dataclass(frozen=True)
class Change:
    """An update: which targets get which version."""

    targets: Sequence[Target]
    version: int


def changes(*targets: Target) -> list[Change]:
    """Return updates of one target or several, of one of two versions; always the same ones."""
    draw = random.Random(5)  # noqa: S311 - nobody has to guess them
    choices = [targets, *([target] for target in targets)]
    return [Change(draw.choice(choices), draw.randrange(2)) for _ in range(UPDATES)]


def update(fleet: Fleet, versions: Sequence[Made], change: Change) -> None:
    """Send a version to some targets and commit it."""
    made = versions[change.version]
    tensors = {Target.VERIFIER: made.verifier_tensors, Target.DRAFT: made.draft_tensors}
    with fleet.update(
        version=str(change.version), target=change.targets, cast=CastPolicy.ALLOW
    ) as session:
        for target in change.targets:
            session.push(tensors[target], target=target)
        session.finish()


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("eagle", "packed"), ("draft model", "plain")],
    indirect=["weights"],
)
def test_no_step_sees_two_versions(tmp_path: Path, kind: str, weights: str) -> None:
    """Under load each step computes what it does when each commit waits for it; none fails."""
    versions = [PAIRS[kind].make(tmp_path / str(seed), seed) for seed in (1, 2)]
    old = versions[0]
    with (
        running(old.verifier, **old.options) as llm,
        Fleet([address_of(llm)]) as fleet,
        ThreadPoolExecutor(1) as pool,
    ):
        worker = worker_of(llm)
        known: dict[str, int] = {}
        for version in (1, 0):
            update(fleet, versions, Change(BOTH, version))
            known |= dict.fromkeys(marks(worker), version)

        def train() -> None:
            for change in changes(*BOTH):
                update(fleet, versions, change)

        trainer = pool.submit(train)
        loaded = run(llm, lambda _step: not trainer.done())
        trainer.result()
        commits = [status.num_commits for status in fleet.workers[0].info().targets]

        def as_before(step: int) -> bool:
            """Make live what a step ran with."""
            if step < len(loaded.steps):
                wanted = loaded.steps[step].marks
                for target, mark, now in zip(BOTH, wanted, marks(worker), strict=True):
                    if mark != now:
                        update(fleet, versions, Change([target], known[mark]))
            return step < loaded.stopped

        assert run(llm, as_before) == loaded
    assert len({step.marks for step in loaded.steps}) > 1
    assert {reason for _, reason in loaded.answers.values()} == {"length"}
    assert sum(commits) >= UPDATES
