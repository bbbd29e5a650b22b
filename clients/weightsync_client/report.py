"""What an update came to, worker by worker."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from weightsync.core.errors import WeightSyncError
from weightsync.core.types import Target
from weightsync.core.views import CommitReport


class Outcome(enum.Enum):
    """What a worker made of an update."""

    COMMITTED = "committed"
    """It holds the new version."""
    NOT_COMMITTED = "not committed"
    """It says that it does not hold the new version."""
    HELD = "held"
    """It held the version before, and was left alone."""
    UNKNOWN = "unknown"
    """It could not be asked."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker after an update.

    Attributes:
        address: Where it is.
        session_id: Its session.
        outcome: What it made of it.
        weight_versions: What its targets hold; empty if it could not be asked.
        commit: Its own report, if it committed.
        error: Why it did not.
    """

    address: str
    session_id: str
    outcome: Outcome
    weight_versions: Mapping[Target, str]
    commit: CommitReport | None = None
    error: WeightSyncError | None = None

    def __str__(self) -> str:
        """Return e.g. `10.0.0.1:50051: committed (verifier 'v2')`."""
        held = ", ".join(
            f"{target} {version!r}" for target, version in self.weight_versions.items()
        )
        why = f": {self.error}" if self.error else ""
        return f"{self.address}: {self.outcome.value} ({held or 'not known'}){why}"


@dataclass(frozen=True, slots=True)
class FleetReport:
    """All workers after an update.

    Attributes:
        weight_version: The new version.
        workers: One report per worker, in the fleet's order.
        sent_tensors: Distinct tensors that were sent.
        sent_bytes: Payload bytes put into messages; those for several workers count once.
        ignored_names: Names of the source that ignore patterns left out, sorted.
        seconds: Time from the start of the session to the last answer.
    """

    weight_version: str
    workers: tuple[WorkerReport, ...]
    sent_tensors: int
    sent_bytes: int
    ignored_names: tuple[str, ...]
    seconds: float

    @property
    def committed(self) -> bool:
        """Tell whether every worker holds the new version."""
        there = (Outcome.COMMITTED, Outcome.HELD)
        return all(worker.outcome in there for worker in self.workers)

    def __str__(self) -> str:
        """Return a line per worker."""
        return "\n".join(map(str, self.workers))


class FleetError(WeightSyncError):
    """Some workers hold the new version and others do not; `report` says which.

    Calling `finish` of the session again repairs it as long as the sessions live; `repair` pushes
    to those that lack the version; a new update of the whole fleet always helps.
    """

    def __init__(self, report: FleetReport) -> None:
        """Make the error of a report in which not all have committed."""
        there = (Outcome.COMMITTED, Outcome.HELD)
        done = sum(worker.outcome in there for worker in report.workers)
        super().__init__(
            f"{done} of {len(report.workers)} workers committed {report.weight_version!r}; "
            f"finish again, or repair the others, or push again to all:\n{report}"
        )
        self.report = report
