"""Sends messages to one worker over connections that may be lost in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from weightsync.core.errors import (
    ChecksumMismatchError,
    SessionStateError,
    TooManyStreamsError,
    WeightSyncError,
)
from weightsync.core.types import SessionState
from weightsync.core.views import StreamReport
from weightsync_client.chunker import Message
from weightsync_client.errors import ConnectionLostError
from weightsync_client.stream import Stream

_ATTEMPTS = 5
_PAUSE = 0.2

StillMissing = Callable[[Sequence[Message]], list[Message]]
"""Asks the worker what it misses, and returns the messages of which it needs something."""


class Lane:
    """A row of streams into one session, each acknowledged by its answer.

    A message is kept until the stream that carried it is acknowledged; streams end early enough
    for at most `window_bytes` to be kept. So whatever a source was, nothing has to be asked of it
    twice: after a lost connection the kept messages that the worker still misses go again.
    """

    def __init__(
        self,
        open_stream: Callable[[], Stream],
        session_state: Callable[[], SessionState],
        still_missing: StillMissing,
        window_bytes: int,
    ) -> None:
        """Start without a stream.

        Args:
            open_stream: Begins an UpdateWeights call.
            session_state: Waits for the worker and asks how the session stands.
            still_missing: Which messages the worker needs again.
            window_bytes: Most payload bytes that are kept.
        """
        self._open_stream = open_stream
        self._session_state = session_state
        self._still_missing = still_missing
        self._half = window_bytes // 2
        # At most two: the last one takes messages, the one before waits for its answer.
        self._streams: deque[Stream] = deque()

    def send(self, message: Message) -> None:
        """Send a message; waits for the worker's pace.

        Raises:
            WeightSyncError: the worker refused something, or can't be reached any more.
        """
        if len(self._streams) > 1 and self._streams[0].ended:
            self._acknowledge()
        while not self._streams or self._streams[-1].payload_bytes > self._half:
            if self._streams:
                self._streams[-1].close()
            if len(self._streams) > 1:
                self._acknowledge()
            else:
                self._streams.append(self._open_stream())
        try:
            self._streams[-1].put(message)
        except WeightSyncError as error:
            self._resume(error)

    def settle(self) -> None:
        """Wait until the worker has all that was sent.

        Raises:
            WeightSyncError: the worker refused something, or can't be reached any more.
        """
        while self._streams:
            self._streams[0].close()
            self._acknowledge()

    def cancel(self) -> None:
        """End the streams at once."""
        for stream in self._streams:
            stream.cancel()
        self._streams.clear()

    def _acknowledge(self) -> StreamReport | None:
        try:
            report = self._streams[0].result()
        except WeightSyncError as error:
            self._resume(error)
            return None
        self._streams.popleft()
        return report

    def _resume(self, error: WeightSyncError) -> None:
        kept = [message for stream in self._streams for message in stream.unacknowledged]
        for attempt in range(1, _ATTEMPTS + 1):
            self.cancel()
            if not isinstance(
                error, ConnectionLostError | ChecksumMismatchError | TooManyStreamsError
            ):
                raise error
            if attempt > 1 or isinstance(error, TooManyStreamsError):
                time.sleep(error.retry_after or _PAUSE * attempt)
            state = self._session_state()
            if state is not SessionState.OPEN:
                raise SessionStateError(
                    f"the connection was lost ({error}), and the session is {state.name} by now",
                    state=state.name,
                ) from error
            kept = self._still_missing(kept)
            self._streams.append(self._open_stream())
            try:
                for message in kept:
                    self._streams[-1].put(message)
            except WeightSyncError as again:
                error = again
            else:
                return
        raise error
