"""Arenas of workers on the same host: a connection that hands them over, and their memory."""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from weightsync.core.arena_socket import LONGEST_LINE, PREFIX, is_same_user
from weightsync.core.dtypes import DType
from weightsync.core.errors import OutOfBoundsError, SessionStateError
from weightsync.core.regions import Region
from weightsync.core.types import TensorKey
from weightsync.core.views import PlacedPart, TensorPlacement

# By size of an element; numpy copies whole elements many times faster than bytes in rows.
_ELEMENT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

Elements = npt.NDArray[np.generic]


class ArenaSocket:
    """A connection to the socket on which a worker hands out its arenas.

    Attributes:
        name: Of the socket.
        client_id: What the worker calls this connection; it shows that both are on one host.
    """

    def __init__(self, name: str, timeout: float) -> None:
        """Connect, within `timeout` seconds.

        Raises:
            OSError: there is no such socket on this host, it is another user's, or is not a
                worker's.
        """
        if not name.startswith(PREFIX):
            raise OSError(f"{name!r} is no worker's socket")
        self.name = name
        self._mapped: tuple[int, memoryview] | None = None
        # One question at a time: two sessions may begin at once.
        self._asking = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(f"\0{name}")
            self.client_id = self._greeting()
        except BaseException:
            self._socket.close()
            raise

    @property
    def alive(self) -> bool:
        """Tell whether the worker still is at the other end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        # It says nothing unasked: what can be read while nobody asks is its end.
        with self._asking:
            return not poll.poll(0)

    def map(self, session_id: str) -> memoryview:
        """Return the memory of a session's arena; that of the session before, if it is the same.

        Raises:
            SessionStateError: the worker does not give it.
        """
        with self._asking:
            return self._map(session_id)

    def _map(self, session_id: str) -> memoryview:
        try:
            self._socket.sendall(f"{session_id}\n".encode())
            data, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise SessionStateError(f"the worker did not hand out its arena: {error}") from error
        if not data or not fds:
            raise SessionStateError(
                f"the worker does not hand out the arena of session {session_id}: the session has"
                " ended, or its bytes come another way"
            )
        try:
            status = os.fstat(fds[0])
            # A worker that keeps arenas gives the same one again: its pages are mapped already.
            if self._mapped is None or self._mapped[0] != status.st_ino:
                size = status.st_size
                memory = memoryview(mmap.mmap(fds[0], size) if size else bytearray())
                self._mapped = (status.st_ino, memory)
            return self._mapped[1]
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Tell the worker that the arenas are not mapped any more."""
        self._mapped = None
        self._socket.close()

    def _greeting(self) -> str:
        if not is_same_user(self._socket):
            raise PermissionError("the worker is another user's")
        data = b""
        while not data.endswith(b"\n"):
            more = self._socket.recv(LONGEST_LINE - len(data))
            if not more:
                raise ConnectionError(f"{self.name!r} did not say who we are")
            data += more
        return data[:-1].decode("ascii")


class MappedArena:
    """The arena of one session, as arrays over the tensors that may be placed in it."""

    def __init__(self, memory: memoryview, placements: Iterable[TensorPlacement]) -> None:
        """Take the arena's memory and where tensors lie in it.

        Raises:
            OutOfBoundsError: a part of a tensor lies outside the memory.
        """
        self.memory = memory
        self._placements = {TensorKey(p.target, p.name): p for p in placements}
        for placement in self._placements.values():
            for part in placement.parts:
                _check_inside(placement, part, memory.nbytes)

    @property
    def keys(self) -> Collection[TensorKey]:
        """The tensors that may be placed."""
        return self._placements.keys()

    def find(self, key: TensorKey) -> TensorPlacement | None:
        """Return where a tensor lies, if it may be placed."""
        return self._placements.get(key)

    def array(self, dtype: DType, part: PlacedPart, box: Region) -> Elements:
        """Return a box of a tensor that lies in a part, of shape `box.sizes`; items are opaque."""
        inside = box.relative_to(part.region)
        offset = part.offset + sum(i * s for i, s in zip(inside.offsets, part.strides, strict=True))
        return np.ndarray(box.sizes, _ELEMENT[dtype.itemsize], self.memory, offset, part.strides)


def elements(data: memoryview, dtype: DType, shape: tuple[int, ...]) -> Elements:
    """Look at row-major bytes as an array of opaque items."""
    return np.frombuffer(data, _ELEMENT[dtype.itemsize]).reshape(shape)


def _check_inside(placement: TensorPlacement, part: PlacedPart, size: int) -> None:
    itemsize = placement.dtype.itemsize
    if not part.region.fits(placement.shape) or len(part.strides) != part.region.ndim:
        raise OutOfBoundsError(f"{part} is no part of tensor {placement.name!r}")
    if part.region.numel == 0:
        return
    last = part.offset + sum(
        (n - 1) * s for n, s in zip(part.region.sizes, part.strides, strict=True)
    )
    if last + itemsize > size:
        raise OutOfBoundsError(
            f"the worker says that tensor {placement.name!r} reaches to byte {last + itemsize} of"
            f" an arena of {size}"
        )
