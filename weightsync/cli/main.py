"""The command `weightsync`. Each subcommand is a file of its own and imports what it needs."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsync import __version__
from weightsync.cli.catch_up import catch_up
from weightsync.cli.demo.command import demo
from weightsync.cli.demo.vllm.command import demo_vllm
from weightsync.cli.group import Commands
from weightsync.cli.push import push
from weightsync.cli.serve import serve
from weightsync.cli.sharing import sharing
from weightsync.cli.soak import soak
from weightsync.cli.status import status
from weightsync.cli.tensors import tensors
from weightsync.cli.token import token
from weightsync.cli.verify import verify

app = typer.Typer(
    name="weightsync",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 weights differ, 2 usage, 3 does not fit, 4 not there, 5 not as "
    "things stand, 6 busy, 7 unreachable, 8 worker failed, 9 partly committed, 10 not "
    "allowed, 130 interrupted.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def weightsync(
    debug: Annotated[bool, typer.Option(help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Put new weights into running inference workers, verifier and draft together."""


for command in (
    serve,
    push,
    catch_up,
    status,
    tensors,
    verify,
    sharing,
    soak,
    demo,
    demo_vllm,
):
    app.command(no_args_is_help=command not in (demo, demo_vllm, serve, soak))(command)
app.add_typer(token, name="token")
