from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from vllm import LLM
from weightsync_client import Fleet

from tests.vllm import trainer
from tests.vllm.drafts import PAIRS, Made
from tests.vllm.engine import address_of, running, worker_of
from tests.vllm.proof import Seen, see
from weightsync.core.types import CastPolicy, Target, Transport
from weightsync.server.server import Server
from weightsync.testing.faults.child import until
from weightsync.testing.faults.relay import Relay
from weightsync.testing.faults.worker import open_files, pass_time

PATIENCE = 60.0
BOTH = (Target.VERIFIER, Target.DRAFT)
TARGETS = [(Target.VERIFIER,), (Target.DRAFT,), BOTH]
# Bytes that trainers send; less than they need for the whole.
ENOUGH = {TARGETS[0]: 600_000, TARGETS[1]: 200_000, BOTH: 800_000}
WAYS = (Transport.SHARED_MEMORY, Transport.INLINE)
BEFORE = [("session.started", 1), ("chunk.completed", 1), ("prepare.completed", 1)]
WITHIN = [("commit.parameter", 1), ("commit.parameter", 4)]


@dataclass(frozen=True)
class Scene:
    """A vLLM that speculates, and two versions of both its models; the old one is live."""

    llm: LLM
    old: Made
    new: Made
    before: Seen

    @property
    def server(self) -> Server:
        """The service in the worker."""
        server: Server = worker_of(self.llm).weight_transfer_engine.server
        return server

    def push(self, made: Made, targets: Sequence[Target]) -> Seen:
        """Commit a version as one should, and return what vLLM answers then."""
        tensors = {Target.VERIFIER: made.verifier_tensors, Target.DRAFT: made.draft_tensors}
        with (
            Fleet([address_of(self.llm)]) as fleet,
            fleet.update(version="kept", target=targets, cast=CastPolicy.ALLOW) as session,
        ):
            for target in targets:
                session.push(tensors[target], target=target)
            session.finish()
        return see(self.llm)

    def start(self, address: str, targets: Sequence[Target], *ways: Transport) -> BaseProcess:
        """Start a trainer with the new version."""
        folders = {Target.VERIFIER: self.new.verifier, Target.DRAFT: self.new.draft}
        return trainer.start(address, {target: folders[target] for target in targets}, *ways)

    def settle(self) -> None:
        """Let the lease of the session that was left behind be over, and wait for its end."""
        until(self._is_idle, "the session ends")

    def _is_idle(self) -> bool:
        # Again and again: a step that went on meanwhile may have renewed the lease.
        pass_time(self.server, 1e6)
        worker = self.server.worker
        busy = any(status.session_id for status in worker.info().targets)
        return not (busy or worker.staging_bytes or worker.open_streams)

    def versions(self) -> list[str]:
        """Return what the worker says that it holds."""
        return [status.weight_version for status in self.server.worker.info().targets]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Start vLLM with an EAGLE draft."""
    folder = tmp_path_factory.mktemp("killed")
    old, new = (PAIRS["eagle"].make(folder / str(seed), seed) for seed in (1, 2))
    with running(old.verifier, **old.options) as llm:
        made = Scene(llm, old, new, see(llm))
        # One that is not killed: it commits, and what starts with the first process is there.
        process = made.start(address_of(llm), BOTH, *WAYS)
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert made.versions() == ["trained", "trained"]
        process.close()
        assert made.push(old, BOTH) == made.before
        yield made


def check_nothing_happened(scene: Scene, files: list[str]) -> None:
    """Fail unless the old versions answer, nothing is left, and the next session works."""
    assert see(scene.llm) == scene.before
    assert scene.versions() == ["kept", "kept"]
    # Some of those before may have been closing.
    until(lambda: not Counter(open_files()) - Counter(files), "files and sockets are closed")
    assert scene.push(scene.new, BOTH).differs_from(scene.before)
    assert scene.push(scene.old, BOTH) == scene.before


def draws() -> Iterator[tuple[Sequence[Target], int]]:
    """Yield targets, and the byte at which their trainer is killed: always the same ones."""
    draw = random.Random(11)  # noqa: S311 - nobody has to guess them
    for targets in TARGETS:
        for _ in range(3):
            yield targets, draw.randrange(2_000, ENOUGH[targets])


@pytest.mark.parametrize(("targets", "byte"), draws())
def test_killed_at_any_byte_nothing_happened(
    scene: Scene, targets: Sequence[Target], byte: int, tmp_path: Path
) -> None:
    """B56: tokens, logits and proposals stay, however much has come when the trainer is killed."""
    files = open_files()
    with Relay(address_of(scene.llm), tmp_path) as relay:
        relay.at(byte, Relay.freeze)
        process = scene.start(relay.address, targets, Transport.INLINE)
        assert relay.reached.wait(PATIENCE)
        kill(process)
    scene.settle()
    check_nothing_happened(scene, files)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("point", BEFORE)
def test_killed_at_any_step_nothing_happened(
    scene: Scene, targets: Sequence[Target], point: tuple[str, int]
) -> None:
    """B56: likewise, killed at any step before the commit."""
    files = open_files()
    kill_at(scene, targets, point)
    check_nothing_happened(scene, files)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("point", WITHIN)
def test_a_commit_that_has_begun_goes_through(
    scene: Scene, targets: Sequence[Target], point: tuple[str, int]
) -> None:
    """Killed within the commit, what its targets answer is the whole new version."""
    kill_at(scene, targets, point)
    seen = see(scene.llm)
    assert seen != scene.before
    assert seen == scene.push(scene.new, targets)
    assert scene.push(scene.old, BOTH) == scene.before


def kill_at(scene: Scene, targets: Sequence[Target], point: tuple[str, int]) -> None:
    """Kill a trainer while the worker is held at a step, and let the worker go on."""
    event, nth = point
    reached, gone = threading.Event(), threading.Event()
    seen: list[str] = []

    def hold(name: str, _facts: dict[str, object]) -> None:
        seen.append(name)
        if name == event and seen.count(event) == nth:
            reached.set()
            gone.wait(PATIENCE)

    remove = scene.server.worker.trace.add(hold)
    try:
        process = scene.start(address_of(scene.llm), targets, *WAYS)
        assert reached.wait(PATIENCE)
        kill(process)
    finally:
        gone.set()
        remove()
    scene.settle()


def kill(process: BaseProcess) -> None:
    """End a trainer at once."""
    process.kill()
    process.join(PATIENCE)
    process.close()
