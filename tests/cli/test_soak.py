from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.cli.conftest import run
from weightsync.testing.faults.cases import AT_STEPS, MODES, ON_THE_WIRE, PLACES, TARGETS, Case
from weightsync.testing.faults.child import BrokenPromiseError
from weightsync.testing.faults.stage import Played, Stage
from weightsync.testing.soak.rounds import draw
from weightsync.testing.soak.run import Soak, SoakError


def test_a_seed_names_its_updates() -> None:
    """The same seed, number and workers are the same update; another seed is another one."""
    assert draw(7, 31, 3) == draw(7, 31, 3)
    assert [draw(7, index, 3) for index in range(9)] != [draw(8, index, 3) for index in range(9)]


def test_everything_is_drawn() -> None:
    """Two thousand updates have every step, fault, mode, set of targets and number of workers."""
    cases = [draw(0, index, 3) for index in range(2000)]
    steps = {case.place.event for case in cases if case.place.side != "wire"}
    assert steps == {place.event for place in PLACES}
    assert {case.fault for case in cases} == {*AT_STEPS, *ON_THE_WIRE}
    assert {case.mode for case in cases} == set(MODES)
    assert {case.targets for case in cases} == set(TARGETS)
    assert set(Counter(case.num_workers for case in cases)) == {1, 2, 3}


class Broken(Stage):
    """A stage on which nothing holds: the real ones do not break."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def play(self, case: Case) -> Played:
        """Break a promise."""
        raise BrokenPromiseError(f"{case.mode} is torn")


def test_a_failure_names_the_command_that_shows_it() -> None:
    """A broken promise is told with its update and with the line that plays it again."""
    with pytest.raises(SoakError, match=r"update 4 .* is torn") as raised:
        next(Soak(Broken(), seed=7, workers=2).play(iter([4]), seconds=1))
    assert raised.value.command == "weightsync soak --seed 7 --workers 2 --only 4"


def test_one_update_is_played_by_the_command() -> None:
    """The command starts its own workers, plays an update and tells what it saw."""
    done = run("soak", "--seed", "7", "--workers", "1", "--only", "3", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["updates"] == 1
    assert told["torn"] == 0
