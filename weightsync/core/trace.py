"""The one seam through which logs, metrics and fault injection see each step of a session."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Hook = Callable[[str, dict[str, object]], None]
"""Called with the name of a step and its facts.

What it raises before or within a step, the step raises. What has happened stands whatever a hook
makes of it: there its error is logged only.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that hooks are told of.

    Attributes:
        name: What it is called.
        text: What happens.
        span: It takes a while, and is told of at its start and at its end.
    """

    name: str
    text: str
    span: bool = False

    @property
    def events(self) -> tuple[str, ...]:
        """The names that hooks are called with."""
        ends = ("started", "completed", "failed")
        return tuple(f"{self.name}.{end}" for end in ends) if self.span else (self.name,)


WORKER_STEPS = (
    Step("session.started", "a session is open"),
    Step("stream", "an UpdateWeights stream", span=True),
    Step("chunk", "a message is checked and stored", span=True),
    Step("prepare", "everything is checked before it may go live", span=True),
    Step("commit", "the change, between two forward passes", span=True),
    Step("commit.parameter", "a parameter is going to be written"),
    Step("share.checked", "share groups were looked at after the change"),
    Step("rollback", "a commit that failed is taken back", span=True),
    Step("quarantine", "a target may not serve"),
    Step("quarantine.lifted", "a target may serve again"),
    Step("session.ended", "a session is over, for whatever reason"),
)
"""Each step that a worker tells of, in the order of a session."""

CLIENT_STEPS = (
    Step("session.started", "a session is asked for, or joined"),
    Step("start", "sessions are opened on all workers", span=True),
    Step("push", "a source is read and sent", span=True),
    Step("message", "a message is going to be sent"),
    Step("settle", "workers acknowledge what was sent", span=True),
    Step("prepare", "the first phase, on all workers", span=True),
    Step("worker.prepare", "the first phase, on one worker", span=True),
    Step("finish", "the second phase, on all workers", span=True),
    Step("worker.finish", "the second phase, on one worker", span=True),
    Step("session.ended", "a session is over for this client, for whatever reason"),
)
"""Each step that a client tells of, in the order of a session."""

carried: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("carried", default=())
"""Metadata that a client's calls take along; for hooks that follow a session across processes."""

_log = logging.getLogger(__name__)


class Trace:
    """Tells hooks of steps: `NAME` for a point, `NAME.started/.completed/.failed` for a span."""

    def __init__(self, *hooks: Hook) -> None:
        """Start with some hooks."""
        self._hooks = list(hooks)
        self._facts: dict[str, object] = {}

    def bound(self, **facts: object) -> Trace:
        """Return what tells the same hooks, of each step these facts as well."""
        bound = Trace()
        bound._hooks = self._hooks
        bound._facts = self._facts | facts
        return bound

    def add(self, hook: Hook) -> Callable[[], None]:
        """Add a hook; return the function that takes it away."""
        self._hooks.append(hook)
        return lambda: self._hooks.remove(hook)

    def __call__(self, name: str, **facts: object) -> None:
        """Tell of a point within a step, which fails if a hook does."""
        facts = self._facts | facts
        for hook in tuple(self._hooks):
            hook(name, facts)

    def told(self, name: str, **facts: object) -> None:
        """Tell of what has happened, which no hook can undo."""
        facts = self._facts | facts
        for hook in tuple(self._hooks):
            try:
                hook(name, facts)
            except Exception:  # noqa: BLE001, PERF203 - hooks are somebody else's
                _log.exception("a trace hook failed at %s", name)

    @contextmanager
    def span(self, name: str, **facts: object) -> Iterator[dict[str, object]]:
        """Tell of a span; facts put into the yielded dict are told at its end, with `seconds`.

        If a hook refuses its start, all are told that it has failed: those before it know of it.
        """
        start = time.perf_counter()
        try:
            self(f"{name}.started", **facts)
            yield facts
        except BaseException as error:
            self.told(f"{name}.failed", **facts, error=error, seconds=time.perf_counter() - start)
            raise
        self.told(f"{name}.completed", **facts, seconds=time.perf_counter() - start)
