"""Whether a worker makes OpenTelemetry spans: nothing is imported, and nothing paid, if not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import grpc

from weightsync.core.errors import InvalidRequestError
from weightsync.core.trace import Hook

Follow = Callable[[grpc.ServicerContext], AbstractContextManager[None]]
"""Stands around a call: what happens within belongs to the span that the caller sent along."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """How a server makes spans.

    Attributes:
        hooks: For the worker's trace.
        follow: Around each call.
    """

    hooks: tuple[Hook, ...] = ()
    follow: Follow = lambda _call: nullcontext()


def make_tracing(*, enabled: bool) -> Tracing:
    """Return how spans are made, by the process's global tracer provider.

    Raises:
        InvalidRequestError: OpenTelemetry is not installed.
    """
    if not enabled:
        return Tracing()
    try:
        from weightsync.wire import spans  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidRequestError(
            f"tracing needs OpenTelemetry ({error}): pip install 'weightsync[otel]'",
            subjects=["tracing"],
        ) from error
    return Tracing(
        hooks=(spans.worker_spans().hook,),
        follow=lambda call: spans.continued(call.invocation_metadata()),
    )
