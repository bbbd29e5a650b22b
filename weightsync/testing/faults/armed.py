"""The failpoint of a child process, set by its parent."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.core.trace import Trace
from weightsync.testing.failpoints import (
    Act,
    Failpoint,
    Freeze,
    kill_process,
    raise_error,
)
from weightsync.testing.faults.talk import tell


class Armed:
    """At most one failpoint at a time; the parent hears when it is reached.

    Attributes:
        acts: What may happen there, by name; `freeze` lasts until `go`.
    """

    def __init__(self, trace: Trace) -> None:
        """Set failpoints on a trace."""
        self.acts: dict[str, Act] = {"kill": kill_process, "raise": raise_error}
        self._trace = trace
        self._freeze = Freeze()
        self._remove: Callable[[], None] | None = None

    def arm(self, event: str, nth: int, act: str) -> None:
        """Let something happen at the nth time of an event, counted from now."""
        self.go()
        self._freeze = freeze = Freeze()
        happens = freeze if act == "freeze" else self.acts[act]

        def tell_and_act() -> None:
            tell("reached", event)
            happens()

        self._remove = self._trace.add(Failpoint(event, tell_and_act, nth=nth).hook)

    def go(self) -> None:
        """Let go on what is frozen, and let nothing happen any more."""
        if self._remove is not None:
            self._remove()
            self._remove = None
        self._freeze.release()
