"""The memory itself, and the budget that bounds it."""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from weightsync.core.errors import ArenaFullError

Bytes = npt.NDArray[np.uint8]


class Arena:
    """Anonymous shared memory of a fixed size; a page takes memory when it is first written.

    It lies in a memfd, so that another process which is handed `fd` can map the same pages, and
    so that nothing stays behind in /dev/shm whatever happens to this process.
    """

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes of address space; 0 is fine."""
        self.size = size
        self.fd = os.memfd_create("weightsync-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            # mmap refuses an empty mapping.
            self._bytes: Bytes | None = (
                np.frombuffer(mmap.mmap(self.fd, size), np.uint8) if size else np.empty(0, np.uint8)
            )
        except BaseException:
            os.close(self.fd)
            raise

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return a writable view; the memory lives as long as the view."""
        if self._bytes is None:
            raise ValueError("the arena is closed")
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Give the memory back, as soon as no view is left. Idempotent."""
        if self._bytes is not None:
            self._bytes = None
            os.close(self.fd)


class Arenas:
    """Gives arenas out and, if it may, keeps those that come back for the next session.

    Memory is given back only when nobody holds a view of it or its `fd` any more, so what lies in
    a kept arena is of the past: a session takes nothing from where it has not written.
    """

    def __init__(self, max_spare_bytes: int) -> None:
        """Keep at most so many bytes that nobody uses."""
        self._max_spare_bytes = max_spare_bytes
        self._lock = threading.Lock()
        self._spare: list[Arena] = []

    def take(self, size: int) -> Arena:
        """Return an arena of a size: a kept one, or a new one."""
        with self._lock:
            for arena in self._spare:
                if arena.size == size:
                    self._spare.remove(arena)
                    return arena
        return Arena(size)

    def give_back(self, arena: Arena) -> None:
        """Take an arena back; what is too much is closed, the oldest first."""
        with self._lock:
            self._spare.append(arena)
            while sum(spare.size for spare in self._spare) > self._max_spare_bytes:
                self._spare.pop(0).close()

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._max_spare_bytes = 0
            while self._spare:
                self._spare.pop().close()


class ArenaBudget:
    """Counts the staged bytes of all sessions against one limit."""

    def __init__(self, limit: int) -> None:
        """Allow `limit` bytes."""
        self._limit = limit
        self._lock = threading.Lock()
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes that sessions hold now."""
        return self._used

    @property
    def left(self) -> int:
        """Bytes that sessions may still take."""
        return self._limit - self._used

    def reserve(self, nbytes: int) -> None:
        """Take bytes.

        Raises:
            ArenaFullError: there are not that many left; nothing is taken.
        """
        with self._lock:
            if self._used + nbytes > self._limit:
                raise ArenaFullError(
                    f"the staging arena has {self.left} of {self._limit} bytes"
                    f" left and {nbytes} are needed; end another session, raise the limit, or"
                    " use IN_PLACE",
                    retry_after=1.0,
                )
            self._used += nbytes

    def release(self, nbytes: int) -> None:
        """Give bytes back."""
        with self._lock:
            self._used -= nbytes
