"""`weightsync push`: make a checkpoint live on workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from weightsync_client.credentials import Credentials

from weightsync.cli.credentials import with_credentials
from weightsync.cli.options import Checkpoint, Json, TargetName, To, addresses, name_mapping
from weightsync.cli.options import target as target_named
from weightsync.cli.output import print_facts, print_json, size
from weightsync.core.errors import InvalidRequestError
from weightsync.core.malloc import tune_malloc
from weightsync.core.types import CastPolicy, Scope, SharedTensorPolicy, Target, UpdateMode

if TYPE_CHECKING:
    from weightsync_client import FleetReport, Progress

Policy = Annotated[
    str,
    typer.Option(
        "--shared",
        help="refuse, accept-equal or unshare: what happens to a draft's tensors that are one "
        "storage with the verifier's.",
    ),
]


@with_credentials
def push(
    checkpoint: Checkpoint,
    *,
    to: To,
    version: Annotated[str, typer.Option(help="What the worker will hold.", show_default=False)],
    target: TargetName = "verifier",
    draft: Annotated[
        Path | None, typer.Option(help="A draft's checkpoint, which switches together with it.")
    ] = None,
    expect: Annotated[
        str | None, typer.Option(help="Push only if the target holds this version now.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="The checkpoint holds only some of the tensors.")
    ] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Write into live weights: less memory, a pause.")
    ] = False,
    cast: Annotated[
        bool, typer.Option("--cast", help="Convert element types to the worker's.")
    ] = False,
    shared: Policy = "refuse",
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of names that the worker need not have; may be repeated."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(help="OLD=NEW: another prefix of names; may be repeated."),
    ] = None,
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Refuse NaN and infinity.")
    ] = False,
    json: Json = False,
    credentials: Credentials,
) -> None:
    """Make a checkpoint live on one worker or many: on all of them or on none.

    For example:

        weightsync push ./step-100 --to 127.0.0.1:50051 --version step-100

        weightsync push ./policy --draft ./draft --to 10.0.0.1:50051,10.0.0.2:50051 --version v7

        weightsync push ./eagle --target draft --to unix:///run/worker.sock --version v8
    """
    from weightsync_client import Checkpoint as Folder
    from weightsync_client import NameMapping, push_model

    tune_malloc()

    wanted = target_named(target)
    if wanted is Target.DRAFT and draft is not None:
        raise InvalidRequestError(
            "--target draft says that the checkpoint is the draft: give no --draft as well",
            subjects=["draft"],
        )
    # Opened first: a folder that is no checkpoint never reaches a worker.
    main, beside = Folder(checkpoint), Folder(draft) if draft is not None else None
    model, draft_model = (None, main) if wanted is Target.DRAFT else (main, beside)
    with _progress(quiet=json) as progress:
        report = push_model(
            addresses(to),
            model,
            draft_model,
            version=version,
            credentials=credentials,
            expected_base_versions={wanted: expect} if expect is not None else None,
            scope=Scope.PARTIAL if partial else Scope.FULL,
            mode=UpdateMode.IN_PLACE if in_place else UpdateMode.STAGED,
            cast=CastPolicy.ALLOW if cast else CastPolicy.REFUSE,
            shared_tensors=_policy(shared),
            ignore_names=ignore or (),
            names=NameMapping(rules=tuple(map(name_mapping, rename or ()))),
            check_finite=check_finite,
            progress=progress,
        )
    if json:
        print_json(_as_json(report))
    else:
        print_facts(_as_facts(report))


def _policy(name: str) -> SharedTensorPolicy:
    try:
        return SharedTensorPolicy[name.upper().replace("-", "_")]
    except KeyError:
        raise InvalidRequestError(
            f"--shared {name!r} is unknown: write refuse, accept-equal or unshare",
            subjects=["shared"],
        ) from None


def _as_json(report: FleetReport) -> dict[str, object]:
    return {
        "version": report.weight_version,
        "sent_tensors": report.sent_tensors,
        "sent_bytes": report.sent_bytes,
        "seconds": report.seconds,
        "ignored_names": report.ignored_names,
        "workers": [
            {
                "address": worker.address,
                "outcome": worker.outcome.value,
                "versions": {str(t): held for t, held in worker.weight_versions.items()},
                "pause_seconds": worker.commit.pause_seconds if worker.commit else None,
            }
            for worker in report.workers
        ],
    }


def _as_facts(report: FleetReport) -> dict[str, str]:
    facts = {
        "version": report.weight_version,
        "sent": f"{report.sent_tensors} tensors, {size(report.sent_bytes)} in "
        f"{report.seconds:.2f} s ({size(report.sent_bytes / report.seconds)}/s)",
    }
    if report.ignored_names:
        facts["ignored"] = ", ".join(report.ignored_names)
    for worker in report.workers:
        pause = f", paused {worker.commit.pause_seconds * 1000:.1f} ms" if worker.commit else ""
        facts[worker.address] = worker.outcome.value + pause
    return facts


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Show a bar on a terminal: bytes, rate, and what is being sent."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("connecting", total=None)

        def show(moment: Progress) -> None:
            bars.update(
                task,
                completed=moment.bytes_done,
                total=moment.bytes_total,
                description=str(moment.tensor),
            )

        yield show
