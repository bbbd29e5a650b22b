"""Named failpoints: something happens at a chosen step of a session, on either side.

A step is named as hooks of a `Trace` are told of it, see `WORKER_STEPS` and `CLIENT_STEPS`:

    trace = Trace()
    worker = weightsync.serve(model, trace=trace)
    trace.add(Failpoint("commit.parameter", raise_error, nth=3).hook)
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from weightsync.core.errors import InvalidRequestError
from weightsync.core.trace import CLIENT_STEPS, WORKER_STEPS
from weightsync.server.worker import Worker

EVENTS = frozenset(event for step in (*WORKER_STEPS, *CLIENT_STEPS) for event in step.events)
"""Where a failpoint can be."""

Act = Callable[[], None]


class FailpointError(Exception):
    """What a failpoint raises: an error that nobody is prepared for."""


class Failpoint:
    """Acts once, at the nth time of an event.

    Attributes:
        reached: Set just before it acts.
    """

    def __init__(self, event: str, act: Act, *, nth: int = 1) -> None:
        """Wait for an event, counted from now.

        Raises:
            InvalidRequestError: no step has such an event.
        """
        if event not in EVENTS:
            raise InvalidRequestError(
                f"there is no event {event!r}; there are {', '.join(sorted(EVENTS))}",
                subjects=["event"],
            )
        self.reached = threading.Event()
        self._event = event
        self._act = act
        self._left = nth
        self._lock = threading.Lock()

    def hook(self, name: str, _facts: dict[str, object]) -> None:
        """Act, if this is the place; a trace hook."""
        if name != self._event:
            return
        with self._lock:
            self._left -= 1
            here = self._left == 0
        if here:
            self.reached.set()
            self._act()


def raise_error() -> None:
    """Raise in the middle of a step; what has happened already stands, and logs it only."""
    raise FailpointError("a failpoint raised")


def kill_process() -> None:
    """End this process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Freeze:
    """Holds the thread that comes by until it is released."""

    def __init__(self) -> None:
        """Hold."""
        self._released = threading.Event()

    def __call__(self) -> None:
        """Wait; what a failpoint does."""
        self._released.wait()

    def release(self) -> None:
        """Let it go on."""
        self._released.set()


class FullArena:
    """Takes all the room that a worker's arena has left, until it is released."""

    def __init__(self, worker: Worker) -> None:
        """Take nothing yet."""
        self._budget = worker._budget  # noqa: SLF001 - as a greedy session would
        self._taken = 0

    def __call__(self) -> None:
        """Take it; what a failpoint does."""
        rest = self._budget.left
        self._budget.reserve(rest)
        self._taken += rest

    def release(self) -> None:
        """Give it back."""
        self._budget.release(self._taken)
        self._taken = 0
