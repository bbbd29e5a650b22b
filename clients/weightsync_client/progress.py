"""How far a push is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.core.types import TensorKey


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a push.

    Attributes:
        tensor: What was sent last, by the worker's name.
        bytes_done: Payload bytes that were handed to the connections; bytes for several workers
            count once.
        bytes_total: Bytes that a FULL session needs, in the workers' element types; None if
            nobody knows.
        seconds: Time since the session was opened.
    """

    tensor: TensorKey
    bytes_done: int
    bytes_total: int | None
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second so far."""
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0


class Meter:
    """Counts bytes and tells a callback of each message."""

    def __init__(self, tell: Callable[[Progress], None] | None, bytes_total: int | None) -> None:
        """Start the clock."""
        self.bytes_done = 0
        self._bytes_total = bytes_total
        self._tell = tell
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._start

    def count(self, tensor: TensorKey, payload_bytes: int) -> None:
        """Count a message whose last tensor is given."""
        self.bytes_done += payload_bytes
        if self._tell is not None:
            self._tell(Progress(tensor, self.bytes_done, self._bytes_total, self.seconds))
