"""The one seam through which logs, metrics and fault injection see each step of a session."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Hook = Callable[[str, dict[str, object]], None]
"""Called with the name of a step and its facts.

What it raises before or within a step, the step raises. What has happened stands whatever a hook
makes of it: there its error is logged only.
"""

_log = logging.getLogger(__name__)


class Trace:
    """Tells hooks of steps: `NAME` for a point, `NAME.started/.completed/.failed` for a span.

    Names in use: `session.started`, `session.ended`, `stream` (span), `chunk` (span), `prepare`
    (span), `commit` (span), `commit.parameter`, `commit.pause`, `rollback` (span), `abort`,
    `expire`, `quarantine`, `share.checked`.
    """

    def __init__(self, *hooks: Hook) -> None:
        """Start with some hooks."""
        self._hooks = list(hooks)

    def add(self, hook: Hook) -> Callable[[], None]:
        """Add a hook; return the function that takes it away."""
        self._hooks.append(hook)
        return lambda: self._hooks.remove(hook)

    def __call__(self, name: str, **facts: object) -> None:
        """Tell of a point within a step, which fails if a hook does."""
        for hook in tuple(self._hooks):
            hook(name, facts)

    def told(self, name: str, **facts: object) -> None:
        """Tell of what has happened, which no hook can undo."""
        for hook in tuple(self._hooks):
            try:
                hook(name, facts)
            except Exception:  # noqa: BLE001, PERF203 - hooks are somebody else's
                _log.exception("a trace hook failed at %s", name)

    @contextmanager
    def span(self, name: str, **facts: object) -> Iterator[dict[str, object]]:
        """Tell of a span; facts put into the yielded dict are told at its end, with `seconds`."""
        self(f"{name}.started", **facts)
        start = time.perf_counter()
        try:
            yield facts
        except BaseException as error:
            self.told(f"{name}.failed", **facts, error=error, seconds=time.perf_counter() - start)
            raise
        self.told(f"{name}.completed", **facts, seconds=time.perf_counter() - start)
