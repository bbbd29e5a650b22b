"""One UpdateWeights call: a short queue of serialized messages, and what became of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import grpc

from weightsync.core.types import ChecksumType
from weightsync.core.views import StreamReport
from weightsync.wire.chunk import serialize_chunk
from weightsync_client.chunker import Message
from weightsync_client.errors import ConnectionLostError, DeadlineError, from_rpc
from weightsync_client.worker import Worker

QUEUED = 2
"""Messages that wait for gRPC to take them: one on its way, one ready."""


class Stream:
    """Sends messages of one session, and keeps them until the worker has acknowledged all.

    The worker's pace is the sender's: `put` waits while the queue is full. An error of the worker
    comes up in the next `put`, however much is still to be sent.
    """

    def __init__(self, worker: Worker, session_id: str, lane: int, idle: float) -> None:
        """Begin the call.

        Args:
            worker: Where to.
            session_id: What it fills.
            lane: Which of the worker's connections to use.
            idle: Longest time in which the worker takes nothing, in seconds.
        """
        self.unacknowledged: list[Message] = []
        self.payload_bytes = 0
        self._worker = worker
        self._idle = idle
        self._changed = threading.Condition()
        # Messages are put together once for all workers; the session is named ahead of them.
        self._queue = deque([serialize_chunk(session_id, (), (), ChecksumType.NONE)])
        self._closed = False
        self._ended = False
        self._call = worker.send(self._messages(), lane)
        self._call.add_done_callback(self._on_end)

    def put(self, message: Message) -> None:
        """Send a message as soon as the worker takes it.

        Raises:
            WeightSyncError: what ended the call; the message is among `unacknowledged`.
            DeadlineError: the worker took nothing for too long.
        """
        self.unacknowledged.append(message)
        self.payload_bytes += message.payload_bytes
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._ended or len(self._queue) < QUEUED, self._idle
            )
            if room and not self._ended:
                self._queue.append(message.data)
                self._changed.notify_all()
                return
        if room:
            self._check()
            raise ConnectionLostError(
                f"{self._worker.address} ended the stream before all was sent",
                worker=self._worker.address,
            )
        self.cancel()
        raise DeadlineError(
            f"{self._worker.address} took nothing for {self._idle} s; the session is still open "
            f"until its lease ends",
            worker=self._worker.address,
        )

    @property
    def ended(self) -> bool:
        """Tell whether the call has ended, well or not."""
        return self._ended

    def close(self) -> None:
        """Say that no message follows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def result(self) -> StreamReport:
        """Wait for the worker's answer, after `close`: it has taken all messages.

        Raises:
            WeightSyncError: what ended the call instead.
            DeadlineError: no answer, though little was left to be taken.
        """
        report = self._check()
        self.unacknowledged.clear()
        return report

    def cancel(self) -> None:
        """End the call at once."""
        self._call.cancel()
        self.close()

    def _check(self) -> StreamReport:
        try:
            return self._call.result(timeout=self._idle)
        except grpc.FutureTimeoutError:
            self.cancel()
            raise DeadlineError(
                f"{self._worker.address} did not acknowledge within {self._idle} s",
                worker=self._worker.address,
            ) from None
        except grpc.FutureCancelledError:
            raise ConnectionLostError(
                f"the stream to {self._worker.address} was cancelled", worker=self._worker.address
            ) from None
        except grpc.RpcError as error:
            raise from_rpc(error, self._worker.address) from None

    def _messages(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed or self._ended)
                if self._ended or not self._queue:
                    return
                data = self._queue.popleft()
                self._changed.notify_all()
            yield data

    def _on_end(self, _call: object) -> None:
        with self._changed:
            self._ended = True
            self._queue.clear()
            self._changed.notify_all()
