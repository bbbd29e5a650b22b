"""One update of three workers, of which one has bad luck."""

from __future__ import annotations

import pytest
from weightsync_client import Fleet, FleetError, Outcome, Worker

from tests.faults.trio import LOST, Trio, outcomes, versions, when_held
from weightsync.core.errors import TargetBusyError, WeightSyncError


def test_a_worker_that_dies_before_prepare_stops_all(trio: Trio) -> None:
    """B63: while bytes are on their way, the death of one keeps the old version on the others."""
    trio.push(2)
    session = trio.open(3)
    trio.unlucky.kill()
    with pytest.raises(WeightSyncError) as caught:
        session.finish()
    assert trio.relay.address in str(caught.value)
    assert trio.workers[0].state().holds(2, 2)
    assert trio.workers[1].state().holds(2, 2)
    trio.restart()
    trio.push(4)


def test_a_worker_that_dies_in_prepare_stops_all(trio: Trio) -> None:
    """B63: what others have prepared is dropped when one can't be prepared."""
    trio.push(5)
    session = trio.open(6)
    session.settle()
    trio.unlucky.arm("prepare.completed")
    with when_held(trio.unlucky, trio.unlucky.kill), pytest.raises(LOST):
        session.finish()
    assert trio.workers[0].state().holds(5, 5)
    assert trio.workers[1].state().holds(5, 5)
    trio.restart()
    trio.push(7)


@pytest.mark.parametrize("step", ["commit.started", "commit.parameter", "session.ended"])
def test_a_worker_that_dies_in_finish_is_named(trio: Trio, step: str) -> None:
    """B63: lost between prepare and the end of finish, one is unknown, and the report says so."""
    trio.push(8)
    session = trio.open(9)
    session.settle()
    trio.unlucky.arm(step)
    with when_held(trio.unlucky, trio.unlucky.kill), pytest.raises(FleetError) as caught:
        session.finish()
    assert outcomes(caught.value) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.UNKNOWN]
    assert versions(caught.value) == ["v9", "v9", "?"]
    assert trio.workers[0].state().holds(9, 9)
    assert trio.workers[1].state().holds(9, 9)
    trio.restart()
    with pytest.raises(FleetError) as again:
        session.finish()
    assert outcomes(again.value) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.NOT_COMMITTED]
    trio.push(10)


def test_a_worker_that_was_out_of_reach_is_asked_again(trio: Trio) -> None:
    """B63: lost within finish and found again, it is asked what it did when finish is repeated."""
    trio.push(11)
    session = trio.open(12)
    session.settle()
    trio.unlucky.arm("commit.started")

    def vanish() -> None:
        trio.relay.refuse()
        trio.relay.cut()
        trio.unlucky.go()

    with when_held(trio.unlucky, vanish), pytest.raises(FleetError) as caught:
        session.finish()
    assert outcomes(caught.value) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.UNKNOWN]
    trio.relay.accept()
    assert session.finish().committed
    assert trio.held(12) == [True, True, True]


def test_a_busy_worker_stops_the_start(trio: Trio) -> None:
    """B63: one worker that is held by somebody else keeps the others from being opened for long."""
    trio.push(15)
    with Worker(trio.unlucky.address) as direct:
        other = Fleet([direct]).update(version="other", holder="somebody else")
        with pytest.raises(TargetBusyError, match="somebody else"):
            trio.open(16)
        for way in trio.fleet.workers[:2]:
            assert [status.session_id for status in way.info().targets] == ["", ""]
        other.abort()
    trio.push(16)
