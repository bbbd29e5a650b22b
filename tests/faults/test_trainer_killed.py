"""A trainer that is killed leaves the old version or the new one, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.core.types import Target, TargetState
from weightsync.testing.faults.child import until
from weightsync.testing.faults.processes import TrainerProcess
from weightsync.testing.faults.relay import Relay, random_bytes
from weightsync.testing.faults.scene import Scene

BOTH = ("verifier", "draft")
BEFORE = [
    ("session.started", 1),
    ("stream.started", 1),
    ("chunk.started", 1),
    ("chunk.completed", 1),
    ("chunk.completed", 10),
    ("stream.completed", 1),
    ("prepare.started", 1),
    ("prepare.completed", 1),
]
WITHIN = [
    ("commit.started", 1),
    ("commit.parameter", 1),
    ("commit.parameter", 3),
    ("share.checked", 1),
    ("commit.completed", 1),
    ("session.ended", 1),
]


def kill_at(scene: Scene, point: tuple[str, int], targets: tuple[str, ...], mode: str) -> int:
    """Kill a trainer while the worker is held at a step; return the version it was to bring."""
    seed = scene.new_seed()
    scene.worker.arm(*point)
    with TrainerProcess(scene.worker.address, seed=seed, targets=targets, mode=mode) as trainer:
        scene.worker.wait_reached()
        trainer.kill()
    scene.worker.go()
    scene.expire()
    return seed


@pytest.mark.parametrize("point", BEFORE, ids=str)
def test_before_the_commit_the_old_version_stays(scene: Scene, point: tuple[str, int]) -> None:
    """B56: killed at any step before the commit, the session expires and changes nothing."""
    kill_at(scene, point, BOTH, "STAGED")
    scene.check(scene.old)
    scene.check_recovers()


@pytest.mark.parametrize("point", WITHIN, ids=str)
def test_a_commit_that_has_begun_goes_through(scene: Scene, point: tuple[str, int]) -> None:
    """A trainer that is killed while its session is committed leaves the whole new version."""
    seed = kill_at(scene, point, BOTH, "STAGED")
    scene.check((seed, seed))
    scene.check_recovers()


@pytest.mark.parametrize("targets", [("verifier",), ("draft",)], ids=str)
@pytest.mark.parametrize("point", [("chunk.completed", 1), ("commit.parameter", 1)], ids=str)
def test_the_other_target_is_not_touched(
    scene: Scene, point: tuple[str, int], targets: tuple[str, ...]
) -> None:
    """A trainer of one target leaves the other's own weights as they were, killed or not."""
    seed = kill_at(scene, point, targets, "STAGED")
    held = dict(zip(BOTH, scene.old, strict=True))
    if point[0].startswith("commit"):
        held |= dict.fromkeys(targets, seed)
    scene.check((held["verifier"], held["draft"]))
    scene.check_recovers()


@pytest.mark.parametrize("targets", [("verifier",), ("draft",), BOTH], ids=str)
@pytest.mark.parametrize("point", [("chunk.completed", 2), ("prepare.completed", 1)], ids=str)
def test_half_written_live_weights_never_serve(
    scene: Scene, point: tuple[str, int], targets: tuple[str, ...]
) -> None:
    """B61: killed within an IN_PLACE session, what was touched refuses to compute until healed."""
    kill_at(scene, point, targets, "IN_PLACE")
    states = {target: status.state for target, status in scene.targets().items()}
    # The draft computes with the verifier's embedding.
    touched = [Target.DRAFT] if targets == ("draft",) else list(Target)
    assert [t for t, state in states.items() if state is TargetState.QUARANTINED] == touched
    assert until(lambda: scene.worker.state().refused, "a forward is refused")
    scene.check_recovers()
    assert {status.state for status in scene.targets().values()} == {TargetState.READY}


@pytest.mark.parametrize("point", [("session.started", 1), ("chunk.completed", 1)], ids=str)
def test_an_in_place_session_without_a_byte_changes_nothing(
    scene: Scene, point: tuple[str, int]
) -> None:
    """Killed before the first byte, an IN_PLACE session leaves the old version in service."""
    # The first message of a stream names its session and brings no byte.
    kill_at(scene, point, BOTH, "IN_PLACE")
    scene.check(scene.old)
    scene.check_recovers()


def test_an_in_place_commit_goes_through(scene: Scene) -> None:
    """Killed within the commit, an IN_PLACE session ends as the new version."""
    seed = kill_at(scene, ("commit.started", 1), BOTH, "IN_PLACE")
    scene.check((seed, seed))
    scene.check_recovers()


@pytest.mark.parametrize("byte", random_bytes(8, seed=3))
def test_killed_at_any_byte_the_old_version_stays(scene: Scene, byte: int, tmp_path: Path) -> None:
    """However many bytes have come, a trainer that is killed before it finishes changes nothing."""
    with Relay(scene.worker.address, tmp_path) as relay:
        relay.at(byte, Relay.freeze)
        with TrainerProcess(relay.address, seed=scene.new_seed()) as trainer:
            assert relay.reached.wait(60)
            trainer.kill()
        relay.close()
    scene.expire()
    scene.check(scene.old)
    scene.check_recovers()
