"""The one seam through which logs, metrics and fault injection see each step of a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Hook = Callable[[str, dict[str, object]], None]
"""Called with the name of a step and its facts; what it raises, the step raises."""


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
        """Tell of a point."""
        for hook in tuple(self._hooks):
            hook(name, facts)

    @contextmanager
    def span(self, name: str, **facts: object) -> Iterator[dict[str, object]]:
        """Tell of a span; facts put into the yielded dict are told at its end, with `seconds`."""
        self(f"{name}.started", **facts)
        start = time.perf_counter()
        try:
            yield facts
        except BaseException as error:
            self(f"{name}.failed", **facts, error=error, seconds=time.perf_counter() - start)
            raise
        self(f"{name}.completed", **facts, seconds=time.perf_counter() - start)
