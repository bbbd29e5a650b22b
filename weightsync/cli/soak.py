"""`weightsync soak`: random updates with random faults, for as long as one likes."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.options import Json
from weightsync.cli.output import print_json, print_line, size

if TYPE_CHECKING:
    from weightsync.testing.soak.run import Tally

_PROGRESS_SECONDS = 10.0


def soak(
    *,
    seconds: Annotated[float, typer.Option(help="How long; the last update is finished.")] = 120.0,
    seed: Annotated[
        int | None, typer.Option(help="Which faults: the same ones each time.", show_default="any")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many worker processes.")] = 3,
    only: Annotated[
        int | None, typer.Option(help="Make this update only, to see its failure again.")
    ] = None,
    json: Json = False,
) -> None:
    """Update workers of its own while clients and workers are killed and connections break.

    After each fault every worker must hold the old or the new version, bit for bit, and say which
    (or, IN_PLACE, that it holds neither); generation goes on, the next update succeeds, and nothing
    is left behind. Exits with 1 at the first broken promise, and tells the command that shows it
    again.

    For example:

        weightsync soak --seconds 3600 --seed 7
    """
    from weightsync.cli.exits import DIFFERENT
    from weightsync.testing.soak.run import Soak, SoakError

    seed = secrets.randbelow(1_000_000) if seed is None else seed
    indices = itertools.count() if only is None else iter([only])
    tally, told = None, 0.0
    if not json:
        print_line(f"seed {seed}, {workers} workers")
    try:
        with Soak.open(seed, workers) as run:
            for tally in run.play(indices, seconds):
                if not json and tally.seconds >= told + _PROGRESS_SECONDS:
                    told = tally.seconds
                    print_line(_line(tally))
    except SoakError as error:
        sys.stderr.write(f"{error}\n{error.command}\n")
        raise typer.Exit(DIFFERENT) from None
    if tally is None:
        return
    if json:
        print_json({"seed": seed, "workers": workers, **dataclasses.asdict(tally), "torn": 0})
    else:
        print_line(_line(tally))


def _line(tally: Tally) -> str:
    return (
        f"{tally.seconds:.0f} s: {tally.updates} updates, {tally.faults} faults,"
        f" {size(tally.sent_bytes)}, 0 torn weights"
    )
