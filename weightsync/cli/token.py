"""`weightsync token`: the file of tokens that a worker takes."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.options import Json
from weightsync.cli.output import print_json, print_line
from weightsync.server.scopes import AccessScope

if TYPE_CHECKING:
    from weightsync.server.tokens import TokenFile

token = typer.Typer(
    help="Make and revoke the tokens of a worker that runs with `serve --tokens`.",
    no_args_is_help=True,
)

File = Annotated[
    Path,
    typer.Option(
        "--tokens",
        envvar="WEIGHTSYNC_TOKENS",
        help="The worker's file of tokens.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Option("--name", help="Whose token.", show_default=False)]


@token.command(no_args_is_help=True)
def new(
    *,
    tokens: File,
    name: Name,
    scope: Annotated[
        list[AccessScope],
        typer.Option(help="What it allows; may be repeated.", show_default=False),
    ],
    days: Annotated[
        float | None, typer.Option(help="How long it lasts; for ever if left out.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a token and print it: this once, as the file keeps its hash only.

    A worker that runs takes it at once. To push takes `read`, and `write` of each target.

    For example:

        weightsync token new --tokens tokens.json --name trainer --scope read --scope write:verifier

        weightsync token new --tokens tokens.json --name dashboard --scope read --days 90
    """
    from weightsync.server.tokens import TokenFile, new_secret

    known = TokenFile.parse(tokens.read_bytes()) if tokens.exists() else TokenFile()
    expires = None if days is None else datetime.now(timezone.utc) + timedelta(days=days)
    secret = new_secret()
    _replace(tokens, known.with_token(name, secret, scope, expires))
    if json:
        print_json(
            {
                "name": name,
                "token": secret,
                "scopes": [one.value for one in scope],
                "expires": expires,
            }
        )
    else:
        print_line(secret)


@token.command(no_args_is_help=True)
def revoke(*, tokens: File, name: Name, json: Json = False) -> None:
    """Take a token out of the file; a worker that runs refuses it from its next call on.

    For example:

        weightsync token revoke --tokens tokens.json --name trainer
    """
    from weightsync.server.tokens import TokenFile

    _replace(tokens, TokenFile.parse(tokens.read_bytes()).without(name))
    if json:
        print_json({"name": name})


def _replace(path: Path, tokens: TokenFile) -> None:
    """Write the file in one step, so that a worker never reads half of it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.touch(mode=0o600)
    if path.exists():
        unfinished.chmod(path.stat().st_mode)
    unfinished.write_text(tokens.model_dump_json(indent=2) + "\n")
    unfinished.replace(path)
