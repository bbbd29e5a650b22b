"""Progress as plain lines, where there is no terminal: one per push."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from weightsync.cli.demo.events import Event, LeftBehind, Listening, Pushed, Verified
from weightsync.cli.demo.history import History, rate

if TYPE_CHECKING:
    from typing_extensions import Self


class Lines:
    """Writes to standard error what a person who reads a log wants to know."""

    def __init__(self, history: History) -> None:
        """Show a history that grows."""
        self._history = history

    def __enter__(self) -> Self:
        """Return itself; nothing is to be prepared."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave all as it is."""

    def show(self, event: Event) -> None:
        """Write a line for those events that deserve one."""
        match event:
            case Listening():
                _write(f"worker at {event.address}\n{event.sharing}")
            case Pushed():
                _write(self._pushed(event))
            case LeftBehind():
                _write(f"from here on, a copy of the draft ({event.version}) gets no updates")
            case Verified():
                _write(f"compared {event.compared} tensors, {len(event.differences)} differ")
            case _:
                pass

    def _pushed(self, pushed: Pushed) -> str:
        history = self._history
        seconds = pushed.time - history.trained[0].time
        rates = {updated: acceptance.now for updated, acceptance in history.acceptance.items()}
        return (
            f"{seconds:5.1f} s  {pushed.version:<9} loss {history.losses()[1]:.2f}  "
            f"{rate(pushed):4.0f} MB/s  stood still {pushed.pause_seconds * 1000:.1f} ms  "
            f"accepted {percent(rates[True])} with updates, {percent(rates[False])} without  "
            f"{' '.join(history.last.text.split())[:40] if history.last else ''}"
        )


def percent(share: float | None) -> str:
    """Return a share for people."""
    return "-" if share is None else f"{share:.0%}"


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
