"""The worker in one line: `weightsync.serve(model, draft)`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger

from weightsync.core.errors import InvalidRequestError
from weightsync.core.trace import Trace
from weightsync.core.types import Limits
from weightsync.engines.base import Engine
from weightsync.engines.modules import ModuleEngine
from weightsync.server.logs import LogFormat, make_logger
from weightsync.server.server import Server
from weightsync.server.settings import ServerConfig
from weightsync.server.worker import Worker

if TYPE_CHECKING:
    from torch import nn


def serve(
    verifier: nn.Module | None = None,
    draft: nn.Module | None = None,
    *,
    engine: Engine | None = None,
    address: str = "127.0.0.1:0",
    allow_insecure: bool = False,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
    tls_client_ca: str | Path | None = None,
    tokens: str | Path | None = None,
    reflection: bool | None = None,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    health_port: int | None = None,
    health_host: str = "127.0.0.1",
    shared_memory: bool = True,
    tracing: bool = False,
    limits: Limits | None = None,
    trace: Trace | None = None,
    log: FilteringBoundLogger | None = None,
) -> Server:
    """Serve models, which go on serving forward passes, and return the running server.

    Args:
        verifier: The policy's model. Hugging Face models get their checkpoints' names.
        draft: The model that proposes tokens.
        engine: An engine instead of modules.
        address: `HOST:PORT` (port 0: a free one) or `unix:///PATH`.
        allow_insecure: Allow a TCP address that other hosts can reach without TLS.
        tls_certificate: PEM file with the server's certificate chain; None: no TLS.
        tls_key: PEM file with its private key.
        tls_client_ca: PEM file with those who sign the certificates that clients must have then.
        tokens: File with the tokens that callers must have then, see `weightsync token`.
        reflection: Describe the services to tools like grpcurl; None: only to this host.
        metrics_port: Port of `/metrics`, 0 for a free one; None: no `/metrics`.
        metrics_host: Where `/metrics` listens.
        health_port: Port where health alone answers, in plain text, 0 for a free one; None: none.
        health_host: Where that port is.
        shared_memory: Let clients of the same user on this host write into the arena.
        tracing: Make OpenTelemetry spans, by the process's global tracer provider.
        limits: Sizes that are enforced.
        trace: Gets each step of each session.
        log: Where events are logged; None: the standard library's logger `weightsync.server`.

    Raises:
        InvalidRequestError: neither models nor an engine, or both; a bad address; files for TLS
            or with tokens that can't be used; or tracing without `weightsync[otel]`.
    """
    if (engine is None) == (verifier is None and draft is None):
        raise InvalidRequestError(
            "give modules or an engine, not both", subjects=["verifier", "draft", "engine"]
        )
    config = ServerConfig(
        address=address,
        allow_insecure=allow_insecure,
        tls_certificate=_path(tls_certificate),
        tls_key=_path(tls_key),
        tls_client_ca=_path(tls_client_ca),
        tokens=_path(tokens),
        reflection=reflection,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        health_host=health_host,
        health_port=health_port,
        shared_memory=shared_memory,
        tracing=tracing,
    )
    worker = Worker(engine or _engine_for(verifier, draft), limits=limits or Limits(), trace=trace)
    logger = log or make_logger(LogFormat.HOST, sys.stderr, logging.DEBUG)
    try:
        return Server(worker, config, logger)
    except BaseException:
        worker.close(0.0)
        raise


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _engine_for(verifier: nn.Module | None, draft: nn.Module | None) -> Engine:
    # Who serves Hugging Face models has imported transformers; others need not have it.
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        kind = transformers.PreTrainedModel
        if isinstance(verifier, kind) and (draft is None or isinstance(draft, kind)):
            from weightsync.engines.transformers import TransformersEngine  # noqa: PLC0415

            return TransformersEngine(verifier, draft)
    return ModuleEngine(verifier, draft)
