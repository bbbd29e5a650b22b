"""The whole update in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from weightsync.core.errors import InvalidRequestError
from weightsync.core.types import Target
from weightsync_client.credentials import Credentials
from weightsync_client.fleet import Fleet
from weightsync_client.names import NameMapping
from weightsync_client.report import FleetReport
from weightsync_client.sources import Source
from weightsync_client.worker import Worker

Workers: TypeAlias = "str | Worker | Fleet | Iterable[str | Worker]"


def push_model(
    workers: Workers,
    model: Source | None,
    draft: Source | None = None,
    *,
    version: str,
    draft_names: NameMapping | None = None,
    credentials: Credentials | None = None,
    **update: Any,  # noqa: ANN401 - the arguments of Fleet.update, which checks them
) -> FleetReport:
    """Make a new version live on one worker or many: start, push, prepare, finish.

    Args:
        workers: An address, a connection, several of them, or a fleet.
        model: The verifier's weights; None to update the draft only.
        draft: The draft's weights, which switch together with the verifier's.
        version: What the targets will hold.
        draft_names: How the draft's names become the workers'; None: as `names`.
        credentials: Certificates and token for workers that are named by address.
        **update: Further arguments of `Fleet.update`, e.g. `progress`, `scope`, `names`.

    Returns:
        What was sent and what each worker holds.

    Raises:
        WeightSyncError: nothing has changed on any worker.
        FleetError: some workers have committed, others have not; the report says which.
    """
    sources = {Target.VERIFIER: model, Target.DRAFT: draft}
    given = {target: source for target, source in sources.items() if source is not None}
    if not given:
        raise InvalidRequestError(
            "there is neither a model nor a draft to push", subjects=["model"]
        )
    with as_fleet(workers, credentials) as fleet:
        with fleet.update(target=given, version=version, **update) as session:
            for target, source in given.items():
                names = draft_names if target is Target.DRAFT else None
                session.push(source, target=target, names=names)
        return session.report


@contextmanager
def as_fleet(workers: Workers, credentials: Credentials | None = None) -> Iterator[Fleet]:
    """Yield a fleet of what names workers; connections that it opens are closed at the end."""
    if isinstance(workers, Fleet):
        yield workers
        return
    named = [workers] if isinstance(workers, str | Worker) else workers
    with Fleet(named, credentials=credentials) as fleet:
        yield fleet
