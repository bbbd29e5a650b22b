"""The group of all commands: an error becomes one line on standard error and an exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from weightsync.core.errors import WeightSyncError

_INTERRUPTED = 130


class Commands(TyperGroup):
    """Runs a command; `--debug` lets errors through with their tracebacks."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in typer
        """Run the program; wrong usage is told by typer itself."""
        try:
            return super().main(*args, **kwargs)
        except Exception as error:
            if "--debug" in sys.argv:
                raise
            code, message = _explained(error)
            _tell(error, message)
            sys.exit(code)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - as in typer
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit code of an error, and what a person should know."""
    from weightsync.cli import exits

    if isinstance(error, WeightSyncError):
        return exits.exit_code(error), str(error)
    if isinstance(error, ModuleNotFoundError):
        return exits.USAGE, f"{error}: this command needs an extra: pip install 'weightsync[demo]'"
    if isinstance(error, OSError):
        return exits.UNFIT, str(error)
    return exits.INTERNAL, f"{type(error).__name__}: {error} (see `weightsync --debug`)"


def _tell(error: Exception, message: str) -> None:
    line = " ".join(message.split())
    if "--json" in sys.argv:
        subjects = error.subjects if isinstance(error, WeightSyncError) else ()
        told = {"error": type(error).__name__, "message": line, "subjects": subjects}
        line = json.dumps(told)
    else:
        line = f"weightsync: {line}"
    sys.stderr.write(line + "\n")
