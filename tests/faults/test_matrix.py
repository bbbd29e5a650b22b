"""Every step of an update, on both sides, with every fault: a part in each run, all on demand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightsync.testing.faults.cases import AXES, Case, covering, matrix
from weightsync.testing.faults.stage import Stage

# The first of them waits until all processes have started, on a machine that may be busy.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Three workers, who live through all cases; who dies is replaced."""
    with Stage(3, tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest.mark.parametrize("case", covering(), ids=str)
def test_each_fault_at_each_step_leaves_whole_versions(stage: Stage, case: Case) -> None:
    """Each worker holds the old or the new version or says that it does not, and goes on."""
    played = stage.play(case)
    assert played.reached, played


@pytest.mark.matrix
@pytest.mark.parametrize("case", matrix(), ids=str)
def test_the_whole_matrix(stage: Stage, case: Case) -> None:
    """The same for each step, fault, mode, target and number of workers together."""
    played = stage.play(case)
    assert played.reached, played


def test_any_two_values_meet_in_a_case() -> None:
    """What runs each time covers each pair of step, fault, mode, targets and number of workers."""

    def pairs(cases: list[Case]) -> set[object]:
        found: set[object] = set()
        for case in cases:
            values = (case.place, case.fault, case.mode, case.targets, case.num_workers)
            found |= {(a, b) for i, a in enumerate(values) for b in values[i + 1 :]}
        return found

    assert pairs(covering()) == pairs(matrix())
    assert len(covering()) == len(AXES[0]) * len(AXES[1])
