"""Brings workers to a version that others of their fleet hold already."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from weightsync.core.types import Target
from weightsync.core.views import TargetStatus
from weightsync_client.credentials import Credentials
from weightsync_client.phases import all_or_raise
from weightsync_client.push import Workers, as_fleet, push_model
from weightsync_client.report import FleetError, FleetReport, Outcome, WorkerReport
from weightsync_client.sources import Source
from weightsync_client.worker import Worker


def repair(
    workers: Workers,
    model: Source | None,
    draft: Source | None = None,
    *,
    version: str,
    credentials: Credentials | None = None,
    **push: Any,  # noqa: ANN401 - the arguments of push_model, which checks them
) -> FleetReport:
    """Push a version to those workers that do not hold it, and leave the others alone.

    For a fleet that is mixed after a `FleetError`, and for workers that were restarted or came
    late. A version is a name: who says that it holds it is believed, see `verify`.

    Args:
        workers: As for `push_model`: all that are to hold the version.
        model: The verifier's weights of that version; None for an update of the draft only.
        draft: The draft's weights.
        version: What all workers are to hold.
        credentials: As for `push_model`.
        **push: Further arguments of `push_model`.

    Returns:
        What each worker holds; the outcome of those that were left alone is `HELD`.

    Raises:
        WeightSyncError: a worker can't be reached, or refused; no worker has changed.
        FleetError: some of those that lacked it have committed, others have not.
    """
    given = {Target.VERIFIER: model, Target.DRAFT: draft}
    targets = {target for target, source in given.items() if source is not None}
    with as_fleet(workers, credentials) as fleet:
        held = dict(zip(fleet.workers, all_or_raise(_held, fleet.workers), strict=True))
        lacking = [w for w, statuses in held.items() if not _holds(statuses, targets, version)]
        if not lacking:
            return _report(held, FleetReport(version, (), 0, 0, (), 0.0))
        try:
            report = push_model(fleet.part(lacking), model, draft, version=version, **push)
        except FleetError as error:
            raise FleetError(_report(held, error.report)) from error
        return _report(held, report)


def _held(worker: Worker) -> tuple[TargetStatus, ...]:
    return worker.info().targets


def _holds(statuses: Iterable[TargetStatus], targets: set[Target], version: str) -> bool:
    return targets <= {s.target for s in statuses if s.weight_version == version}


def _report(held: dict[Worker, tuple[TargetStatus, ...]], pushed: FleetReport) -> FleetReport:
    """Add the workers that were left alone to the report of the others, in the fleet's order."""
    reports = {report.address: report for report in pushed.workers}
    for worker, statuses in held.items():
        versions = {status.target: status.weight_version for status in statuses}
        alone = WorkerReport(worker.address, "", Outcome.HELD, versions)
        reports.setdefault(worker.address, alone)
    return replace(pushed, workers=tuple(reports[worker.address] for worker in held))
