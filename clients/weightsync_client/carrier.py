"""The small protocol of a transport: how boxes of tensors get into arenas."""

from __future__ import annotations

from typing import Protocol

from weightsync.core.regions import Region
from weightsync.core.types import TensorKey
from weightsync_client.shards import Array


class Carrier(Protocol):
    """Brings boxes of tensors to one worker, or to several that take the same messages."""

    def add(
        self, key: TensorKey, shape: tuple[int, ...], box: Region, array: Array, origin: Region
    ) -> None:
        """Send a box of a tensor.

        Args:
            key: The tensor.
            shape: Its global shape.
            box: The box, in elements of the tensor; not empty.
            array: Holds the elements of `origin`.
            origin: Region of the tensor that contains `box`.
        """

    def own(self) -> None:
        """Copy what waits to be sent, so that its arrays may change."""

    def flush(self) -> None:
        """Send what waits."""
