"""The memory itself, and the budget that bounds it."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weightsync.core.errors import ArenaFullError

Bytes = npt.NDArray[np.uint8]

# Who maps the same pages must not be able to take them away: a read beyond the end kills.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """Anonymous shared memory of a fixed size; a page takes memory when it is first written.

    It lies in a memfd, so that another process which is handed `fd` can map the same pages, and
    so that nothing stays behind in /dev/shm whatever happens to this process. Its size is sealed.

    Attributes:
        size: In bytes.
        fd: Of the memfd.
        holders: Clients that were handed `fd`, and may still write into it.
    """

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes of address space; 0 is fine."""
        self.size = size
        self.holders: set[str] = set()
        self.fd = os.memfd_create("weightsync-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
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

    One that a client has mapped is kept for sessions of that client, as it could still write.
    """

    def __init__(
        self, max_spare_bytes: int, is_connected: Callable[[str], bool] = lambda _client: False
    ) -> None:
        """Keep at most so many bytes that nobody uses; `is_connected` knows clients by name."""
        self._max_spare_bytes = max_spare_bytes
        self._is_connected = is_connected
        self._lock = threading.Lock()
        self._spare: list[Arena] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the arenas that are kept."""
        with self._lock:
            return sum(spare.size for spare in self._spare)

    def take(self, size: int, client: str = "") -> Arena:
        """Return an arena of a size, a kept one or a new one, for sessions of a client."""
        with self._lock:
            # Its own first: others can't have that one.
            for holders in ({client}, set[str]()):
                for arena in self._spare:
                    if arena.size == size and arena.holders == holders:
                        self._spare.remove(arena)
                        return arena
        return Arena(size)

    def give_back(self, arena: Arena) -> None:
        """Take an arena back; what is too much is closed, the oldest first."""
        with self._lock:
            if len(arena.holders) > 1 or not all(map(self._is_connected, arena.holders)):
                arena.close()
                return
            self._spare.append(arena)
            while sum(spare.size for spare in self._spare) > self._max_spare_bytes:
                self._spare.pop(0).close()

    def drop(self, client: str) -> None:
        """Keep nothing any more that a client has mapped."""
        with self._lock:
            for arena in [spare for spare in self._spare if client in spare.holders]:
                self._spare.remove(arena)
                arena.close()

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
