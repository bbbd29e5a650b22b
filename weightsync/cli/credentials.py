"""Options about TLS and tokens, for all commands that talk to workers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from weightsync_client.credentials import Credentials


def _credentials(
    *,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="WEIGHTSYNC_TLS_CA",
            help="PEM file with those who sign workers' certificates: speak TLS.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="WEIGHTSYNC_TLS_CLIENT_CERTIFICATE",
            help="PEM file with a certificate of your own, for workers that want one.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            envvar="WEIGHTSYNC_TLS_CLIENT_KEY", help="PEM file with that one's private key."
        ),
    ] = None,
    tls_server_name: Annotated[
        str,
        typer.Option(
            envvar="WEIGHTSYNC_TLS_SERVER_NAME",
            help="Name in the worker's certificate, if it is not the host.",
            show_default=False,
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="WEIGHTSYNC_TOKEN_FILE", help="File with a token for the worker."),
    ] = None,
) -> Credentials:
    return Credentials(
        ca=tls_ca,
        certificate=tls_cert,
        key=tls_key,
        server_name=tls_server_name,
        token_file=token_file,
    )


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options; what they say, it gets as `credentials`."""
    own = inspect.signature(command, eval_str=True)
    options = inspect.signature(_credentials, eval_str=True).parameters

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:  # noqa: ANN401 - whatever the command takes
        chosen = {name: given.pop(name) for name in options}
        command(**given, credentials=_credentials(**chosen))

    kept = [p for p in own.parameters.values() if p.name != "credentials"]
    signature = own.replace(parameters=[*kept, *options.values()])
    # typer reads both.
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapped
