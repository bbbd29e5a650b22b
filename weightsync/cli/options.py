"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightsync.core.errors import InvalidRequestError
from weightsync.core.types import Target

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one value a line.")]

Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="Folder with safetensors, in the form of Hugging Face, or one such file.",
        show_default=False,
    ),
]

At = Annotated[
    str,
    typer.Argument(
        help="HOST:PORT or unix:///PATH of a worker; several with commas between.",
        envvar="WEIGHTSYNC_ADDRESS",
        show_default=False,
    ),
]

To = Annotated[
    str,
    typer.Option(
        "--to",
        help="HOST:PORT or unix:///PATH of a worker; several with commas between.",
        envvar="WEIGHTSYNC_ADDRESS",
        show_default=False,
    ),
]

TargetName = Annotated[
    str, typer.Option("--target", help="verifier or draft: which of the worker's models.")
]


def addresses(text: str) -> list[str]:
    """Return the addresses in a list with commas between.

    Raises:
        InvalidRequestError: there is none.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise InvalidRequestError("no address: write HOST:PORT or unix:///PATH", subjects=["to"])
    return found


def target(name: str) -> Target:
    """Return the target of a name.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    try:
        return Target[name.upper()]
    except KeyError:
        raise InvalidRequestError(
            f"there is no target {name!r}: write verifier or draft", subjects=["target"]
        ) from None


def name_mapping(text: str) -> tuple[str, str]:
    """Return the old and the new prefix of a rule `OLD=NEW`.

    Raises:
        InvalidRequestError: it has no `=`.
    """
    old, separator, new = text.partition("=")
    if not separator:
        raise InvalidRequestError(f"{text!r} is no rule: write OLD=NEW", subjects=["rename"])
    return old, new
