"""The group of all commands: an error becomes one line on standard error and an exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from weightsync.core.errors import WeightSyncError


class Commands(TyperGroup):
    """Runs a command; `--debug` lets errors through with their tracebacks."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - as in typer, whose own click is private
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except WeightSyncError as error:
            if ctx.params["debug"]:
                raise
            from weightsync.cli.exits import exit_code

            _tell(error)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (ImportError, OSError) as error:
            # Known only by their kind: an extra that is not installed, a folder without rights.
            if ctx.params["debug"] or isinstance(error, BrokenPipeError):
                raise
            from weightsync.cli.exits import INTERNAL, USAGE

            _tell(error)
            missing = isinstance(error, ModuleNotFoundError)
            raise typer.Exit(USAGE if missing else INTERNAL) from None


def _tell(error: Exception) -> None:
    kind = type(error).__name__
    message = " ".join(str(error).split()) or kind
    if isinstance(error, ModuleNotFoundError):
        message += "; this command needs an extra: pip install 'weightsync[demo]'"
    if "--json" in sys.argv:
        subjects = list(error.subjects) if isinstance(error, WeightSyncError) else []
        message = json.dumps({"error": kind, "message": message, "subjects": subjects})
    else:
        message = f"weightsync: {message}"
    sys.stderr.write(message + "\n")
