"""OpenTelemetry spans of a client's sessions; needs the extra `weightsync[otel]`.

from weightsync.core.trace import Trace

fleet = Fleet(addresses, trace=Trace(session_spans()))
"""

from __future__ import annotations

from opentelemetry.trace import TracerProvider

from weightsync.core.trace import Hook
from weightsync.wire.spans import client_spans


def session_spans(provider: TracerProvider | None = None) -> Hook:
    """Return a trace hook that makes a span of each session and of each of its phases.

    Calls that belong to a phase take its W3C `traceparent` along, so that the spans of workers with
    tracing continue the same trace.

    Args:
        provider: Who makes the spans; None: the process's global one.
    """
    return client_spans(provider).hook
