"""Hands arenas to other processes of the same user on the same host.

An abstract unix socket: it leaves no file behind, exists on this host only, and the kernel says
whose process is at the other end. The protocol is told in the contract, at `ListPlacements`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from weightsync.arena.arena import Arena
from weightsync.core.arena_socket import LONGEST_LINE, is_same_user
from weightsync.core.errors import InvalidRequestError, WeightSyncError

MAX_CLIENTS = 64
"""Most connections at once; each may map one arena at a time."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Client:
    """A connection.

    Attributes:
        name: What the worker calls it.
        line: What has arrived of the next line.
    """

    name: str
    line: bytes = b""


class Handover:
    """The socket and its clients; one thread serves all of them.

    Attributes:
        name: Of the socket; empty while it does not listen.
    """

    def __init__(
        self,
        lend: Callable[[str, str], AbstractContextManager[Arena]],
        gone: Callable[[str], None] = lambda _client: None,
    ) -> None:
        """Do not listen yet.

        Args:
            lend: Holds the arena of a session, by its id, for a client, by its name, within a
                block; or raises a `WeightSyncError`.
            gone: Called with the name of a client whose connection has ended.
        """
        self.name = ""
        self._lend = lend
        self._gone = gone
        self._clients: dict[socket.socket, _Client] = {}
        self._names: frozenset[str] = frozenset()

    def listen(self, name: str) -> None:
        """Serve under a name until `close`.

        Raises:
            InvalidRequestError: another process of this host has the name.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{name}")
            self._socket.listen(MAX_CLIENTS)
        except OSError as error:
            self._socket.close()
            raise InvalidRequestError(
                f"the socket {name!r} for shared memory can't be had: {error}",
                subjects=["shared_memory"],
            ) from error
        self._socket.setblocking(False)  # noqa: FBT003
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.name = name
        self._thread = threading.Thread(target=self._serve, name="weightsync-handover", daemon=True)
        self._thread.start()

    def knows(self, client: str) -> bool:
        """Tell whether a client of that name is connected."""
        return client in self._names

    def close(self) -> None:
        """End all connections. Idempotent."""
        if not self.name:
            return
        self.name = ""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        with self._selector, self._socket, self._woken:
            while self.name:
                for key, _ in self._selector.select():
                    if key.fileobj is self._socket:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._clients:
                        self._receive(key.fileobj)
            for connection in tuple(self._clients):
                self._end(connection)

    def _accept(self) -> None:
        # Whoever came may be gone again.
        with contextlib.suppress(OSError):
            connection, _ = self._socket.accept()
            if len(self._clients) >= MAX_CLIENTS or not is_same_user(connection):
                connection.close()
                return
            connection.setblocking(False)  # noqa: FBT003
            client = _Client(uuid.uuid4().hex)
            self._clients[connection] = client
            self._names |= {client.name}
            self._selector.register(connection, selectors.EVENT_READ)
            self._tell(connection, f"{client.name}\n".encode())

    def _receive(self, connection: socket.socket) -> None:
        client = self._clients[connection]
        try:
            data = connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.line += data
        line, end, rest = client.line.partition(b"\n")
        if not data or len(line) > LONGEST_LINE:
            self._end(connection)
        elif end:
            client.line = rest
            self._hand_over(connection, client, line.decode(errors="replace"))

    def _hand_over(self, connection: socket.socket, client: _Client, session_id: str) -> None:
        try:
            with self._lend(session_id, client.name) as arena:
                arena.holders.add(client.name)
                self._tell(connection, b"\0", arena.fd)
        except WeightSyncError as error:
            _log.info("no arena for a client: %s", error)
            self._end(connection)

    def _tell(self, connection: socket.socket, data: bytes, *fds: int) -> None:
        try:
            socket.send_fds(connection, [data], fds)
        except OSError:
            # Who does not read its own answers is as good as gone.
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        client = self._clients.pop(connection)
        self._names -= {client.name}
        self._selector.unregister(connection)
        connection.close()
        self._gone(client.name)
