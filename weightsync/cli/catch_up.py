"""`weightsync catch-up`: a late worker gets what a running one holds."""

from __future__ import annotations

from typing import Annotated

import typer
from weightsync_client.credentials import Credentials

from weightsync.cli.credentials import with_credentials
from weightsync.cli.options import Json
from weightsync.cli.output import print_facts, print_json


@with_credentials
def catch_up(
    address: Annotated[
        str,
        typer.Argument(
            help="HOST:PORT or unix:///PATH of the worker that was restarted or is new.",
            show_default=False,
        ),
    ],
    *,
    peer: Annotated[
        str,
        typer.Option(
            "--from",
            help="HOST:PORT or unix:///PATH of a worker that holds the same part of the models.",
            show_default=False,
        ),
    ],
    json: Json = False,
    credentials: Credentials,
) -> None:
    """Bring a worker to the versions that a peer holds, whose live weights are read for that.

    The peer serves on. Afterwards the digests of both are compared. A worker that holds the
    peer's versions already is left alone.

    For example:

        weightsync catch-up 10.0.0.2:50051 --from 10.0.0.1:50051
    """
    from weightsync_client import catch_up as bring

    report = bring(address, peer, credentials=credentials)
    facts = {
        "outcome": report.outcome.value,
        **{str(target): version for target, version in report.weight_versions.items()},
    }
    if json:
        print_json(facts)
    else:
        print_facts(facts)
