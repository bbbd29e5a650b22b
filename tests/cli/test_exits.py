from __future__ import annotations

import re
from pathlib import Path

import pytest
from weightsync_client import ConnectionLostError, DeadlineError, FleetError, FleetReport

from weightsync.cli.exits import EXIT_CODES, MEANINGS, exit_code
from weightsync.core.errors import Reason, WeightSyncError
from weightsync.wire.status import CODES


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_an_exit_code(reason: Reason) -> None:
    """Each reason leads to an exit code whose meaning is documented."""
    code = exit_code(WeightSyncError.class_for(reason)("text"))
    assert code == EXIT_CODES[CODES[reason]]
    assert code in MEANINGS


@pytest.mark.parametrize("kind", [ConnectionLostError, DeadlineError])
def test_unreachable(kind: type[WeightSyncError]) -> None:
    """A worker that can't be reached is told from one that failed."""
    assert exit_code(kind("text")) == 7


def test_partly_committed() -> None:
    """A fleet of which a part has committed has a code of its own."""
    assert exit_code(FleetError(FleetReport("v", (), 0, 0, (), 1.0))) == 9


def test_exit_codes_are_documented() -> None:
    """The table in the documentation is the one of the code."""
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page.read_text(), re.MULTILINE))
    assert {int(code): meaning for code, meaning in rows.items()} == dict(MEANINGS)
