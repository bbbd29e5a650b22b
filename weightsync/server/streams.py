"""Ends streams whose clients hold them open for nothing, so that they free their thread."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

LAST_WORD_SECONDS = 1.0
"""How long a stream of an ended session has to meet the proper error at its next chunk."""


class OpenStreams:
    """The UpdateWeights streams, by session.

    A handler that waits for the next message can't be told anything; only cancelling the call
    wakes it. So a stream is cancelled when its first message does not come in time, and when its
    session has ended and it did not notice by itself.
    """

    def __init__(self, first_message_seconds: float) -> None:
        """Give a stream that long to say which session it belongs to."""
        self._first_message_seconds = first_message_seconds
        self._lock = threading.Lock()
        self._calls: defaultdict[str, list[grpc.ServicerContext]] = defaultdict(list)

    @contextmanager
    def nameless(self, call: grpc.ServicerContext) -> Iterator[None]:
        """Cancel the call if the block, which waits for its first message, takes too long."""
        timer = _later(self._first_message_seconds, [call])
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def of(self, session_id: str, call: grpc.ServicerContext) -> Iterator[None]:
        """Count the call among the session's streams within the block."""
        with self._lock:
            self._calls[session_id].append(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls[session_id].remove(call)
                if not self._calls[session_id]:
                    del self._calls[session_id]

    def session_ended(self, session_id: str) -> None:
        """Cancel the streams that are still open a moment from now."""
        with self._lock:
            calls = list(self._calls.get(session_id, ()))
        if calls:
            _later(LAST_WORD_SECONDS, calls)


def _later(seconds: float, calls: list[grpc.ServicerContext]) -> threading.Timer:
    def cancel() -> None:
        for call in calls:
            call.cancel()

    timer = threading.Timer(seconds, cancel)
    timer.daemon = True
    timer.start()
    return timer
