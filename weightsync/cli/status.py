"""`weightsync status`: who a worker is, and what its targets hold."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

import typer
from weightsync_client.credentials import Credentials

from weightsync.cli.credentials import with_credentials
from weightsync.cli.options import At, Json, addresses
from weightsync.cli.output import print_json, print_line, print_table, size
from weightsync.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from weightsync.core.views import Event, TargetStatus, WorkerInfo

COLUMNS = (
    "worker",
    "target",
    "state",
    "version",
    "tensors",
    "size",
    "unwritten",
    "commits",
    "last commit",
    "session",
)


@with_credentials
def status(
    worker: At,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on with a line per event of one worker.")
    ] = False,
    json: Json = False,
    *,
    credentials: Credentials,
) -> None:
    """Show what workers hold: state, version and size of each target, and open sessions.

    For example:

        weightsync status 127.0.0.1:50051

        weightsync status 10.0.0.1:50051,10.0.0.2:50051 --json

        weightsync status unix:///run/worker.sock --watch
    """
    from weightsync_client import connect

    places = addresses(worker)
    if watch and len(places) > 1:
        raise InvalidRequestError("--watch follows one worker: name one", subjects=["worker"])
    rows: list[tuple[object, ...]] = []
    for address in places:
        with connect(address, credentials=credentials) as connection:
            info = connection.info()
            if json:
                print_json(_as_json(address, info, serving=connection.serving()))
            rows += (_as_row(address, held) for held in info.targets)
    if not json:
        print_table(COLUMNS, rows)
    if watch:
        with connect(places[0], credentials=credentials) as connection:
            for event in connection.watch():
                if json:
                    print_json(_event_as_json(event))
                else:
                    print_line(_event_as_line(event))


def _as_row(address: str, held: TargetStatus) -> tuple[object, ...]:
    state = held.state.name.lower()
    return (
        address,
        held.target,
        f"{state}: {held.quarantine_reason}" if held.quarantine_reason else state,
        held.weight_version or "-",
        held.num_tensors,
        size(held.num_bytes),
        held.num_unwritten,
        held.num_commits,
        _clock(held.last_commit_time) if held.last_commit_time else "-",
        held.session_id or "-",
    )


def _as_json(address: str, info: WorkerInfo, *, serving: bool) -> dict[str, object]:
    return {
        "worker": address,
        "instance_id": info.instance_id,
        "serving": serving,
        "engine": info.engine,
        "engine_version": info.engine_version,
        "server_version": info.server_version,
        "rank": info.coordinates.rank,
        "world_size": info.coordinates.world_size,
        "controls": info.controls,
        "targets": {
            str(held.target): {
                "state": held.state.name.lower(),
                "version": held.weight_version,
                "tensors": held.num_tensors,
                "bytes": held.num_bytes,
                "unwritten": held.num_unwritten,
                "commits": held.num_commits,
                "last_commit_time": held.last_commit_time,
                "session_id": held.session_id,
                "quarantine_reason": held.quarantine_reason,
            }
            for held in info.targets
        },
    }


def _event_as_json(event: Event) -> dict[str, object]:
    return {
        "event": event.kind.name.lower(),
        "sequence": event.sequence,
        "time": event.time,
        "targets": sorted(map(str, event.targets)),
        "session_id": event.session_id,
        "version": event.weight_version,
        "cause": event.cause,
    }


def _event_as_line(event: Event) -> str:
    told = (
        _clock(event.time),
        event.kind.name.lower(),
        "+".join(sorted(map(str, event.targets))),
        event.weight_version,
        event.cause,
    )
    return "  ".join(filter(None, told))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().strftime("%H:%M:%S")
