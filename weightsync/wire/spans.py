"""Steps of sessions as OpenTelemetry spans, and the W3C context that travels with calls.

Only those who want spans import it: it needs the extra `weightsync[otel]`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import Token
from dataclasses import dataclass
from typing import TypeAlias

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from weightsync.core.trace import CLIENT_STEPS, WORKER_STEPS, Step, carried

_PER_MESSAGE = "chunk"
"""The step that comes thousands of times per session."""

_OUTCOMES_THAT_FAIL = frozenset({"expired", "failed", "refused", "mixed", "unknown"})

_propagator = TraceContextTextMapPropagator()

Attribute: TypeAlias = "str | int | float | list[str]"


@dataclass(frozen=True, slots=True)
class _Phase:
    """A phase that has begun, in the thread that it runs in."""

    step: str
    span: Span
    entered: Token[Context]
    carried: Token[tuple[tuple[str, str], ...]]


class _Thread(threading.local):
    """The phases that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.phases: list[_Phase] = []


class Spans:
    """Makes a span of each session and of each of its phases; `hook` is a trace hook.

    The span of a session is the child of what called for it: on a worker of the client's span,
    on a client of the program's. Phases are children of their session, or of the phase around them;
    on a worker they are linked to the client's span, which may be of another trace if several
    processes fill one session.
    """

    def __init__(
        self, side: str, steps: Iterable[Step], kind: SpanKind, provider: TracerProvider | None
    ) -> None:
        """Make spans of the scope `weightsync.SIDE`; without a provider by the global one."""
        self._tracer = trace.get_tracer(f"weightsync.{side}", None, provider)
        self._kind = kind
        self._phases = {step.name for step in steps if step.span and step.name != _PER_MESSAGE}
        self._sessions: dict[object, Span] = {}
        self._thread = _Thread()

    def hook(self, name: str, facts: dict[str, object]) -> None:
        """Begin or end the span of a step."""
        step, _, event = name.rpartition(".")
        if name == "session.started":
            self._sessions[_session(facts)] = self._tracer.start_span(
                "weightsync.session", kind=self._kind, attributes=_attributes(facts)
            )
        elif name == "session.ended":
            self._end_session(facts)
        elif step in self._phases:
            if event == "started":
                self._enter(step, facts)
            elif event in ("completed", "failed"):
                self._leave(step, facts)

    def _enter(self, step: str, facts: dict[str, object]) -> None:
        # In another thread, or as the first phase in this one, it has to be found by its session.
        session = None if self._thread.phases else self._sessions.get(_session(facts))
        caller = trace.get_current_span().get_span_context()
        span = self._tracer.start_span(
            f"weightsync.{step}",
            None if session is None else trace.set_span_in_context(session),
            attributes=_attributes(facts),
            links=[Link(caller)] if session is not None and caller.is_remote else (),
        )
        entered = context.attach(trace.set_span_in_context(span))
        metadata: dict[str, str] = {}
        _propagator.inject(metadata)
        self._thread.phases.append(
            _Phase(step, span, entered, carried.set(tuple(metadata.items())))
        )

    def _leave(self, step: str, facts: dict[str, object]) -> None:
        phases = self._thread.phases
        if not phases or phases[-1].step != step:
            return  # Another hook has refused its start before this one was told.
        phase = phases.pop()
        carried.reset(phase.carried)
        context.detach(phase.entered)
        phase.span.set_attributes(_attributes(facts))
        error = facts.get("error")
        if isinstance(error, BaseException):
            phase.span.record_exception(error)
            phase.span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        phase.span.end()

    def _end_session(self, facts: dict[str, object]) -> None:
        span = self._sessions.pop(_session(facts), None)
        if span is not None:
            span.set_attributes(_attributes(facts))
            if facts["outcome"] in _OUTCOMES_THAT_FAIL:
                span.set_status(Status(StatusCode.ERROR, str(facts["reason"])))
            span.end()


def client_spans(provider: TracerProvider | None = None) -> Spans:
    """Return spans of a client's side."""
    return Spans("client", CLIENT_STEPS, SpanKind.INTERNAL, provider)


def worker_spans(provider: TracerProvider | None = None) -> Spans:
    """Return spans of a worker's side."""
    return Spans("worker", WORKER_STEPS, SpanKind.SERVER, provider)


@contextmanager
def continued(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[None]:
    """Make the span that a call has brought along the current one; a malformed one is none."""
    brought = {key: value for key, value in metadata if isinstance(value, str)}
    token = context.attach(_propagator.extract(brought))
    try:
        yield
    finally:
        context.detach(token)


def _session(facts: dict[str, object]) -> object:
    """Return what names a session: the client's name for that on all workers, or the worker's."""
    return facts.get("request_id", facts.get("session_id"))


def _attributes(facts: dict[str, object]) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    for name, fact in facts.items():
        if isinstance(fact, str | int | float):
            found[f"weightsync.{name}"] = fact
        elif isinstance(fact, list):
            found[f"weightsync.{name}"] = [str(item) for item in fact]
    return found
