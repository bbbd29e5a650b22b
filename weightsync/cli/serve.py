"""`weightsync serve`: a worker from the shell."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsync.cli.checkpoints import Kind, load_model
from weightsync.cli.options import Json
from weightsync.cli.output import print_json, print_line
from weightsync.core.errors import InvalidRequestError
from weightsync.core.malloc import tune_malloc
from weightsync.core.types import Limits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from weightsync.server.server import Server
    from weightsync.server.settings import ServerSettings


def serve(
    *,
    verifier: Annotated[
        Path | None, typer.Option(help="The verifier's checkpoint folder.", show_default=False)
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="The draft's checkpoint folder.", show_default=False)
    ] = None,
    kind: Annotated[Kind, typer.Option(help="What the folders hold.")] = Kind.AUTO,
    share: Annotated[
        bool, typer.Option(help="Hold weights that verifier and draft have in common once.")
    ] = True,
    device: Annotated[str, typer.Option(help="Where the models are put.")] = "cpu",
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT, port 0 for a free one, or unix:///PATH.")
    ] = None,
    allow_insecure: Annotated[
        bool | None,
        typer.Option("--allow-insecure", help="Let other hosts reach it without TLS."),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file with its certificate chain: serve with TLS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file: clients need a certificate that these signed.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="File of `weightsync token new`: callers need a token.")
    ] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Where /metrics listens.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics for Prometheus, 0 for a free one.")
    ] = None,
    health_host: Annotated[
        str | None, typer.Option(help="Where health answers in plain text, for probes.")
    ] = None,
    health_port: Annotated[
        int | None, typer.Option(help="Port of that, 0 for a free one; none by default.")
    ] = None,
    tracing: Annotated[
        bool | None, typer.Option("--tracing", help="Make OpenTelemetry spans.")
    ] = None,
    reflection: Annotated[
        bool | None, typer.Option(help="Describe the services to grpcurl and the like.")
    ] = None,
    shared_memory: Annotated[
        bool | None,
        typer.Option(help="Let clients of this user on this host write into the arena."),
    ] = None,
    stop_grace: Annotated[
        float | None, typer.Option(help="Seconds that open sessions get when it is stopped.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, e.g. max_streams=8; may be repeated."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0: as torch likes.")] = 0,
    log_format: Annotated[str | None, typer.Option(help="console or json, to stderr.")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error: the lowest written.")
    ] = None,
    json: Json = False,
) -> None:
    """Serve a verifier, a draft, or both. The address is printed as soon as it listens.

    SIGTERM and SIGINT drain it: health says NOT_SERVING, no new sessions, open ones may finish.
    What is left out here comes from WEIGHTSYNC_ADDRESS, WEIGHTSYNC_LIMITS__MAX_STREAMS and so on.

    For example:

        weightsync serve --verifier ./policy --draft ./draft --address 127.0.0.1:50051

        weightsync serve --verifier ./MiniLM --address unix:///run/worker.sock --metrics-port 9400

        weightsync serve --verifier ./policy --tls-certificate c.pem --tls-key k.pem --tokens t.json
    """
    if verifier is None and draft is None:
        raise InvalidRequestError(
            "nothing to serve: give --verifier, --draft or both", subjects=["verifier"]
        )
    given = {
        "address": address,
        "allow_insecure": allow_insecure,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "tokens": tokens,
        "metrics_host": metrics_host,
        "metrics_port": metrics_port,
        "health_host": health_host,
        "health_port": health_port,
        "tracing": tracing,
        "reflection": reflection,
        "shared_memory": shared_memory,
        "stop_grace": stop_grace,
        "log_format": log_format,
        "log_level": log_level,
    }
    tune_malloc()
    settings = _settings({k: v for k, v in given.items() if v is not None}, limit or [])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    models = _models(verifier, draft, kind, device, share=share, threads=threads)
    if stop.is_set():
        return
    server = _start(models, settings)
    try:
        _announce(server, json=json)
        # A wait without end would hold off the signals' handlers on some platforms.
        while not stop.wait(1.0):
            pass
    finally:
        server.stop(settings.stop_grace)


def _settings(given: dict[str, Any], limits: list[str]) -> ServerSettings:
    from pydantic import ValidationError

    from weightsync.server.settings import ServerSettings

    pairs = dict(text.partition("=")[::2] for text in limits)
    unknown = sorted(set(pairs) - set(Limits.__dataclass_fields__))
    if unknown:
        raise InvalidRequestError(
            f"there is no limit {unknown[0]!r}; there are {', '.join(Limits.__dataclass_fields__)}",
            subjects=unknown,
        )
    try:
        return ServerSettings(**(given | {"limits": pairs} if pairs else given))
    except ValidationError as error:
        wrong = [".".join(map(str, e["loc"])) + ": " + e["msg"] for e in error.errors()]
        raise InvalidRequestError("; ".join(wrong), subjects=["settings"]) from None


def _models(
    verifier: Path | None,
    draft: Path | None,
    kind: Kind,
    device: str,
    *,
    share: bool,
    threads: int,
) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
    # Folders only: nothing is looked for on the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from weightsync.cli.quiet import quiet_transformers

    quiet_transformers()
    if threads:
        torch.set_num_threads(threads)
    if share and verifier and draft and kind is not Kind.BASE:
        from weightsync.loader import load_pair

        pair = load_pair(verifier, draft, device=device)
        return pair.verifier, pair.draft
    return (
        load_model(verifier, kind, device) if verifier else None,
        load_model(draft, kind, device) if draft else None,
    )


def _start(
    models: tuple[PreTrainedModel | None, PreTrainedModel | None], settings: ServerSettings
) -> Server:
    import logging
    from dataclasses import asdict

    import weightsync
    from weightsync.server.logs import make_logger

    level = getattr(logging, settings.log_level.upper())
    log = make_logger(settings.log_format, sys.stderr, level)
    return weightsync.serve(*models, limits=settings.limits, log=log, **asdict(settings.config))


def _announce(server: Server, *, json: bool) -> None:
    """Tell where it listens: the first line that it prints."""
    if json:
        print_json(
            {
                "address": server.address,
                "metrics_address": server.metrics_address,
                "health_address": server.health_address,
                "instance_id": server.worker.instance_id,
            }
        )
    else:
        print_line(server.address)
