"""Bounded numbers of things that stay open."""

from __future__ import annotations

import threading
from types import TracebackType

from weightsync.core.errors import TooManyStreamsError


class Admission:
    """Lets a limited number in at once and refuses the rest at once: nobody waits in a queue.

    Use as a context manager around what stays open.
    """

    def __init__(self, what: str, limit: int) -> None:
        """Admit `limit` at once; `what` is the word for them in errors, in plural."""
        self._what = what
        self._limit = limit
        self._lock = threading.Lock()
        self._open = 0

    @property
    def open(self) -> int:
        """How many are in."""
        return self._open

    def __enter__(self) -> None:
        """Come in.

        Raises:
            TooManyStreamsError: the limit is reached.
        """
        with self._lock:
            if self._open >= self._limit:
                raise TooManyStreamsError(
                    f"{self._limit} {self._what} are open, which is this worker's limit;"
                    " end one, or try again later",
                    retry_after=1.0,
                )
            self._open += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Go out."""
        with self._lock:
            self._open -= 1
