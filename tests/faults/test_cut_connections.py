"""Whatever happens to the connection, an update arrives as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from weightsync_client import Fleet, SendOptions, Worker
from weightsync_client.errors import ConnectionLostError, DeadlineError

from weightsync.core.errors import SessionExpiredError, SessionStateError
from weightsync.testing.faults.processes import TrainerProcess
from weightsync.testing.faults.relay import Fault, Relay, random_bytes
from weightsync.testing.faults.scene import Scene
from weightsync.testing.faults.weights import verifier_weights


@pytest.mark.parametrize("fault", [Relay.cut, Relay.half_close])
@pytest.mark.parametrize("byte", [*random_bytes(3, seed=1), 0, 30])
def test_a_cut_connection_is_taken_up_again(
    scene: Scene, byte: int, fault: Fault, tmp_path: Path
) -> None:
    """B65: cut or half closed at any byte, the update goes on where it was and is committed."""
    seed = scene.new_seed()
    with Relay(scene.worker.address, tmp_path) as relay:
        relay.at(byte, fault)
        with TrainerProcess(relay.address, seed=seed) as trainer:
            assert trainer.result() == {}
        assert relay.reached.is_set()
    scene.check((seed, seed))
    scene.check_recovers()


@pytest.mark.parametrize("targets", [("verifier",), ("draft",), ("verifier", "draft")], ids=str)
def test_an_update_in_place_is_taken_up_again(
    scene: Scene, targets: tuple[str, ...], tmp_path: Path
) -> None:
    """An IN_PLACE update whose connection is cut goes on as well; generation waits for its end."""
    seed = scene.new_seed()
    with Relay(scene.worker.address, tmp_path) as relay:
        relay.at(9_000, Relay.cut)
        with TrainerProcess(relay.address, seed=seed, targets=targets, mode="IN_PLACE") as trainer:
            assert trainer.result() == {}
        assert relay.reached.is_set()
    held = dict(zip(("verifier", "draft"), scene.old, strict=True)) | dict.fromkeys(targets, seed)
    scene.check((held["verifier"], held["draft"]))
    scene.check_recovers()


@pytest.mark.parametrize("byte", random_bytes(4, seed=2))
def test_a_changed_byte_is_never_committed(scene: Scene, byte: int, tmp_path: Path) -> None:
    """A byte that changes on its way is sent again, or fails the update; it never goes live."""
    seed = scene.new_seed()
    with Relay(scene.worker.address, tmp_path) as relay:
        relay.at(byte, Relay.corrupt)
        with TrainerProcess(relay.address, seed=seed) as trainer:
            failed = trainer.result()
        assert relay.reached.is_set()
    scene.expire()
    scene.check(scene.old if failed else (seed, seed))
    scene.check_recovers()


def test_a_slow_connection_is_no_fault(scene: Scene, tmp_path: Path) -> None:
    """An update over a connection that delays each piece takes longer, and that is all."""
    seed = scene.new_seed()
    with Relay(scene.worker.address, tmp_path) as relay:
        relay.slow_down(0.01)
        with TrainerProcess(relay.address, seed=seed, window_bytes=32768) as trainer:
            assert trainer.result() == {}
    scene.check((seed, seed))
    scene.check_recovers()


def test_a_connection_may_take_long_to_begin(scene: Scene, tmp_path: Path) -> None:
    """Far away, behind TLS or on a busy host the first bytes take more than a second."""
    with Relay(scene.worker.address, tmp_path) as relay:
        relay.slow_down(1.2)
        with Worker(relay.address) as worker:
            assert worker.info().instance_id == scene.worker.instance_id


def test_a_lost_answer_of_finish_is_asked_for_again(scene: Scene, tmp_path: Path) -> None:
    """Cut within the commit, the trainer learns on a new connection that it has succeeded."""
    seed = scene.new_seed()
    scene.worker.arm("commit.parameter")
    with (
        Relay(scene.worker.address, tmp_path) as relay,
        TrainerProcess(relay.address, seed=seed) as trainer,
    ):
        scene.worker.wait_reached()
        relay.cut()
        scene.worker.go()
        assert trainer.result() == {}
    scene.check((seed, seed))
    scene.check_recovers()


def test_silence_longer_than_the_lease_ends_the_session(scene: Scene, tmp_path: Path) -> None:
    """B56, B86: nobody waits for a frozen connection: neither the worker nor the trainer."""
    seed = scene.new_seed()
    options = SendOptions(chunk_bytes=8192, patience=0.5)
    with (
        Relay(scene.worker.address, tmp_path) as relay,
        Worker(relay.address, timeout=1.0) as worker,
    ):
        session = Fleet([worker]).update(version=f"v{seed}", options=options)
        relay.freeze()
        session.push({"fc.bias": verifier_weights(seed)["fc.bias"]})
        with pytest.raises((DeadlineError, ConnectionLostError)):
            session.settle()
        scene.expire()
        relay.thaw()
        with pytest.raises((SessionExpiredError, SessionStateError, ConnectionLostError)):
            session.finish()
    scene.check(scene.old)
    scene.check_recovers()


def test_a_worker_that_is_away_for_long_is_given_up(scene: Scene, tmp_path: Path) -> None:
    """A trainer waits for a lost worker as long as it was told to, then says which one it lost."""

    def vanish(relay: Relay) -> None:
        relay.refuse()
        relay.cut()

    with Relay(scene.worker.address, tmp_path) as relay:
        relay.at(60_000, vanish)
        with TrainerProcess(relay.address, seed=scene.new_seed(), patience=0.5) as trainer:
            result = trainer.result()
    assert result["error"] in ("ConnectionLostError", "DeadlineError")
    assert relay.address in result["text"]
    scene.expire()
    scene.check(scene.old)
    scene.check_recovers()
