"""Ends sessions whose lease has run out, at the moment it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Reaper:
    """One thread, from the first `wake` on, that sleeps until the next lease ends."""

    def __init__(
        self,
        lock: threading.Condition,
        next_expiry: Callable[[], float | None],
        expire: Callable[[], None],
    ) -> None:
        """Watch leases.

        Args:
            lock: Guards what `next_expiry` reads; notified when that may have changed.
            next_expiry: The monotonic time of the next end, or None; called with the lock.
            expire: Ends what is overdue; called without the lock.
        """
        self._lock = lock
        self._next_expiry = next_expiry
        self._expire = expire
        self._closed = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Look at the leases anew; with the lock held."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="weightsync-reaper", daemon=True)
            self._thread.start()
        self._lock.notify_all()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                expiry = self._next_expiry()
                now = time.monotonic()
                if expiry is None or expiry > now:
                    self._lock.wait(None if expiry is None else expiry - now)
                    continue
            self._expire()
