"""What happened on a worker, for those who watch it."""

from __future__ import annotations

import threading
import time as clock
from collections import deque
from collections.abc import Callable, Collection

from weightsync.core.errors import TooManyStreamsError
from weightsync.core.types import Target
from weightsync.core.views import Event, EventKind


class _History:
    """The last events; the condition guards all of it and tells of changes."""

    def __init__(self, capacity: int) -> None:
        self.changed = threading.Condition()
        self.events: deque[Event] = deque(maxlen=capacity)
        self.last = 0
        self.closed = False

    def after(self, sequence: int) -> Event | None:
        """Return the oldest remembered event after a sequence; the caller holds the condition."""
        if sequence >= self.last or not self.events:
            return None
        return self.events[max(0, sequence + 1 - self.events[0].sequence)]


class EventStream:
    """One watcher's way through the events. One thread reads it; any thread may close it."""

    def __init__(
        self, history: _History, sequence: int, forget: Callable[[EventStream], None]
    ) -> None:
        """Use `EventLog.subscribe`, which makes it."""
        self._history = history
        self._sequence = sequence
        self._forget = forget
        self._greeting: Event | None = Event(history.last, clock.time(), EventKind.WATCHING)
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once no event will come any more."""
        with self._history.changed:
            return self._ended()

    def next(self, timeout: float | None = None) -> Event | None:
        """Wait for the next event.

        Args:
            timeout: Longest wait in seconds; None waits until the stream ends.

        Returns:
            The event, or None after the timeout or at the end; `closed` tells which.
        """
        with self._history.changed:
            self._history.changed.wait_for(lambda: self._ended() or self._pending(), timeout)
            event = None if self._closed else self._pending()
            if event is None:
                return None
            if event is self._greeting:
                self._greeting = None
            else:
                self._sequence = event.sequence
            return event

    def close(self) -> None:
        """End the stream, also while another thread waits in `next`. Idempotent."""
        with self._history.changed:
            self._closed = True
            self._forget(self)
            self._history.changed.notify_all()

    def _pending(self) -> Event | None:
        return self._greeting or self._history.after(self._sequence)

    def _ended(self) -> bool:
        return self._closed or (self._history.closed and self._pending() is None)


class EventLog:
    """The last events of a worker, and the streams that follow them. Thread-safe.

    Streams read from the one history and have no queue of their own: a slow watcher holds up
    nobody and costs no memory, but finds a gap in the sequence where the history went on.
    """

    def __init__(self, capacity: int = 1024, *, max_watchers: int = 32) -> None:
        """Remember `capacity` events and allow `max_watchers` open streams."""
        self._history = _History(capacity)
        self._streams: set[EventStream] = set()
        self._max_watchers = max_watchers

    def publish(
        self,
        kind: EventKind,
        targets: Collection[Target] = (),
        session_id: str = "",
        weight_version: str = "",
        cause: str = "",
        *,
        time: float,
    ) -> Event:
        """Add an event that happened at `time`, in Unix seconds, and wake the watchers."""
        history = self._history
        with history.changed:
            history.last += 1
            concerned = frozenset(targets)
            event = Event(history.last, time, kind, concerned, session_id, weight_version, cause)
            history.events.append(event)
            history.changed.notify_all()
            return event

    def subscribe(self, after_sequence: int = 0) -> EventStream:
        """Open a stream, whose first event is WATCHING with the last sequence so far.

        Args:
            after_sequence: Events after this one follow first, as far back as they are
                remembered; 0 for new events only. A number that is yet to come (known from before
                a restart of the worker) counts as the last one.

        Raises:
            TooManyStreamsError: as many streams are open as are allowed.
        """
        with self._history.changed:
            if len(self._streams) >= self._max_watchers:
                raise TooManyStreamsError(
                    f"{self._max_watchers} watchers are connected, which is the limit;"
                    " close one or try again later",
                    retry_after=1.0,
                )
            last = self._history.last
            start = min(after_sequence, last) if after_sequence > 0 else last
            stream = EventStream(self._history, start, self._streams.discard)
            self._streams.add(stream)
            return stream

    def close(self) -> None:
        """End all streams, each after the events that were published so far. Idempotent."""
        with self._history.changed:
            self._history.closed = True
            self._history.changed.notify_all()
