"""`weightsync demo`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.options import Json
from weightsync.cli.output import print_facts, print_json, size

if TYPE_CHECKING:
    from weightsync.cli.demo.history import History
    from weightsync.cli.demo.plain import Lines
    from weightsync.cli.demo.plan import Plan
    from weightsync.cli.demo.screen import Screen


def demo(
    seconds: Annotated[
        float | None, typer.Option(help="Time for training.", show_default="75")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training, instead.", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller models, a few seconds.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the result.")] = Path(
        "demo-output"
    ),
    json: Json = False,
) -> None:
    """Train a verifier and a draft from scratch and push both into a worker that generates.

    Everything is real: a trainer process, a worker process, gRPC between them. A copy of the draft
    that gets no updates shows why the draft must be kept in step. At the end the worker's weights
    are compared with the trainer's, bit for bit; exits with 1 if they differ.

    For example:

        weightsync demo

        weightsync demo --seconds 120 --out ./run

        weightsync demo --quick --json
    """
    from weightsync.cli.demo.history import History
    from weightsync.cli.demo.plan import QUICK, Plan
    from weightsync.cli.demo.plot import plot
    from weightsync.cli.exits import DIFFERENT

    plan = QUICK if quick else Plan()
    if steps is not None:
        plan = replace(plan, steps=steps, seconds=None)
    elif seconds is not None:
        plan = replace(plan, seconds=seconds, steps=None)
    out.mkdir(parents=True, exist_ok=True)
    history = History()
    start = time.monotonic()
    _run(plan, history, quiet=json)
    picture = out / "demo.png"
    plot(history, picture)
    result = {
        **history.as_json(),
        "seconds": time.monotonic() - start,
        "plot": str(picture),
    }
    if json:
        print_json(result)
    else:
        print_facts(_as_facts(history) | {"plot": str(picture)})
    if not history.equal:
        raise typer.Exit(DIFFERENT)


def _run(plan: Plan, history: History, *, quiet: bool) -> None:
    from weightsync.cli.demo.events import Listening, Saved, Stop, Verified
    from weightsync.cli.demo.processes import Processes

    with _view(history, quiet=quiet) as view, Processes(plan, "trainer", "worker") as both:
        for event in both.events():
            history.add(event)
            view.show(event)
            match event:
                case Saved():
                    both.send("worker", event)
                case Listening():
                    both.send("trainer", event)
                case Verified():
                    both.send("worker", Stop())
                case _:
                    pass


def _view(history: History, *, quiet: bool) -> Lines | Screen:
    from rich.console import Console

    from weightsync.cli.demo.plain import Lines
    from weightsync.cli.demo.screen import Screen

    console = Console(stderr=True, quiet=quiet)
    return Screen(history, console) if sys.stderr.isatty() or quiet else Lines(history)


def _as_facts(history: History) -> dict[str, object]:
    from weightsync.cli.demo.history import rate
    from weightsync.cli.demo.plain import percent

    first, last = history.losses()
    pauses = [pushed.pause_seconds * 1000 for pushed in history.pushed]
    pushed, measured, verified = history.pushed[-1], history.measured, history.verified
    different = verified.differences if verified else ()
    return {
        "version": pushed.version,
        "pushes": f"{len(history.pushed)}, each {pushed.num_tensors} tensors of both models, "
        f"{size(pushed.num_bytes)}",
        "rate": f"{median(map(rate, history.pushed)):.0f} MB/s (median, from start to commit)",
        "generation stood still": f"{median(pauses):.1f} ms (median), {max(pauses):.1f} ms "
        "(longest)",
        "loss": f"{first:.2f} -> {last:.2f} nats per byte",
        "accepted with draft updates": percent(measured.with_updates if measured else None),
        "accepted without": percent(measured.without_updates if measured else None),
        "first sample": repr(history.first.text if history.first else ""),
        "last sample": repr(history.last.text if history.last else ""),
        "worker equals trainer": f"yes, all {verified.compared} tensors bit for bit"
        if history.equal and verified
        else f"NO: {', '.join(different) or 'nothing was compared'}",
    }
