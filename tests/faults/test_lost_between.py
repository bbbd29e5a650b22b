"""A worker or the trainer is lost between the two phases of a commit, and what comes after."""

from __future__ import annotations

import pytest
from weightsync_client import (
    Fleet,
    FleetError,
    Outcome,
    Ticket,
    catch_up,
    repair,
)

from tests.faults.trio import LOST, OPTIONS, Trio, outcomes, when_held
from weightsync.core.errors import SessionExpiredError, SessionStateError, UnknownSessionError
from weightsync.core.types import SessionState
from weightsync.testing.failpoints import Failpoint
from weightsync.testing.faults.child import until
from weightsync.testing.faults.processes import TrainerProcess
from weightsync.testing.faults.weights import draft_weights, verifier_weights

# Processes are started in between, on a machine that may be busy.
pytestmark = pytest.mark.timeout(600)


def test_a_worker_that_dies_between_the_phases_is_repaired(trio: Trio) -> None:
    """B63: all are prepared, one dies: the others commit, the report says so, one call repairs."""
    trio.push(2)
    remove = trio.fleet.trace.add(Failpoint("finish.started", trio.unlucky.kill).hook)
    with pytest.raises(FleetError) as raised:
        trio.open(3).finish()
    remove()
    assert outcomes(raised.value) == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.UNKNOWN]
    trio.restart()
    assert trio.told() == ["v3", "v3", ""]
    report = repair(trio.fleet, verifier_weights(3), draft_weights(3), version="v3")
    assert [w.outcome for w in report.workers] == [Outcome.HELD, Outcome.HELD, Outcome.COMMITTED]
    assert trio.held(3) == [True, True, True]


def test_a_worker_that_dies_after_finish_catches_up_from_a_peer(trio: Trio) -> None:
    """Restarted, it is another instance without a version; a peer brings it to the fleet's."""
    trio.push(4)
    before = trio.unlucky.instance_id
    trio.unlucky.kill()
    trio.restart()
    assert trio.unlucky.instance_id != before
    assert trio.told() == ["v4", "v4", ""]
    assert trio.unlucky.state().holds(0, 0)
    report = catch_up(trio.fleet.workers[2], trio.fleet.workers[0])
    assert report.outcome is Outcome.COMMITTED
    assert trio.held(4) == [True, True, True]
    trio.push(5)


def test_a_peer_that_dies_before_it_is_read_changes_nothing(trio: Trio) -> None:
    """A late worker whose peer is lost keeps what it holds, and may ask another one."""
    trio.push(6)
    late, first, second = trio.fleet.workers
    trio.workers[0].kill()
    trio.restart(0)
    trio.workers[0].arm("session.started")

    def lose_the_peer() -> None:
        trio.unlucky.kill()
        trio.workers[0].go()

    with when_held(trio.workers[0], lose_the_peer), pytest.raises(LOST):
        catch_up(late, second)
    assert trio.workers[0].state().holds(0, 0)
    trio.restart()
    catch_up(late, first)
    catch_up(second, first)
    assert trio.held(6) == [True, True, True]


def prepared(trio: Trio) -> list[SessionState]:
    """Return how the open session of each worker stands; those without one are left out."""
    return [
        worker.session(status.session_id).state
        for worker in trio.fleet.workers
        for status in worker.info().targets[:1]
        if status.session_id
    ]


@pytest.mark.parametrize(
    ("prepared_lease", "left"), [(None, []), (1000.0, [SessionState.PREPARED] * 3)]
)
def test_a_trainer_that_dies_between_the_phases_leaves_prepared_sessions(
    trio: Trio, prepared_lease: float | None, left: list[SessionState]
) -> None:
    """They end with the lease, or wait as long as the trainer wanted; then all is as it was."""
    trio.push(7)
    addresses = [worker.address for worker in trio.fleet.workers]
    with TrainerProcess() as trainer:
        trainer.arm("finish.started", act="kill")
        trainer.push(*addresses, seed=8, lease=10.0, prepared_lease=prepared_lease)
        trainer.hear("reached")
        assert prepared(trio) == [SessionState.PREPARED] * 3
        for worker in trio.workers:
            worker.pass_time(20.0)
        until(lambda: prepared(trio) == left, "the leases are over")
        for worker in trio.workers:
            worker.pass_time(2000.0)
        until(lambda: prepared(trio) == [], "the prepared sessions are over")
    assert trio.held(7) == [True, True, True]
    assert trio.told() == ["v7"] * 3
    trio.push(9)


def test_another_trainer_finishes_what_was_prepared(trio: Trio) -> None:
    """With the ticket, another process takes the second phase of a trainer that has gone."""
    trio.push(10)
    session = trio.open(11, prepared_lease=1000.0)
    session.settle()
    for worker, session_id in zip(trio.fleet.workers, session.ticket.session_ids, strict=True):
        worker.prepare(session_id)
    ticket = Ticket(session.ticket.request, session.ticket.session_ids)
    del session
    with Fleet([worker.address for worker in trio.fleet.workers]) as heirs:
        assert heirs.join(ticket, options=OPTIONS).finish().committed
    assert trio.held(11) == [True, True, True]


def test_a_prepared_session_that_has_expired_is_told(trio: Trio) -> None:
    """A trainer that comes back too late learns so, and no worker has changed."""
    trio.push(12)

    def expire() -> None:
        for worker in trio.workers:
            worker.expire()
        until(lambda: prepared(trio) == [], "the sessions are over")

    remove = trio.fleet.trace.add(Failpoint("finish.started", expire).hook)
    with pytest.raises((SessionExpiredError, SessionStateError, UnknownSessionError)):
        trio.open(13).finish()
    remove()
    assert trio.held(12) == [True, True, True]
    trio.push(14)


def test_exactly_one_of_two_trainers_wins(trio: Trio) -> None:
    """Two trainers race for one worker: one commits, the other is told who and until when."""
    trio.push(15)
    address = trio.workers[0].address
    trio.workers[0].arm("stream.started")
    with TrainerProcess() as first, TrainerProcess() as second:
        racers = [first, second]
        for index, racer in enumerate(racers):
            racer.arm("start.started")
            racer.push(address, seed=16 + index, holder=f"trainer {index}")
        for racer in racers:
            racer.hear("reached")
        for racer in racers:
            racer.go()
        # The winner is held at its first byte until the other one has been refused.
        loser = until(lambda: next((r for r in racers if r.heard("result")), None), "one loses")
        refused = loser.result()
        (winner,) = (racer for racer in racers if racer is not loser)
        trio.workers[0].go()
        assert winner.result() == {}
    index = racers.index(winner)
    assert refused["error"] == "TargetBusyError"
    assert refused["metadata"]["holder"] == f"trainer {index}"
    assert float(refused["metadata"]["expire_time"]) > 0
    assert trio.workers[0].state().holds(16 + index, 16 + index)
    trio.push(18)
