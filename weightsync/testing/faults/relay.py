"""A connection on which something goes wrong at a chosen byte."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from typing_extensions import Self

Fault = Callable[["Relay"], None]

_numbers = itertools.count()
_PIECE_BYTES = 1 << 14


def random_bytes(count: int, *, seed: int) -> list[int]:
    """Return bytes of an update at which something may go wrong: always the same ones."""
    draw = random.Random(seed)  # noqa: S311 - nobody has to guess them
    return [draw.randrange(3_000, 160_000) for _ in range(count)]


class Relay:
    """Forwards TCP or unix connections to a worker; counts the bytes that go up to it.

    Attributes:
        address: Where a trainer connects.
        to: Where the worker is; may be changed when another one takes its place.
        reached: Set once the chosen byte has come.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.to = address
        if address.startswith("unix:"):
            path = folder / f"relay-{next(_numbers)}.sock"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self._listener.listen()
            self.address = f"unix://{path}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.reached = threading.Event()
        self.bytes_up = 0
        self._at: tuple[int, Fault] | None = None
        self._corrupt = False
        self._flowing = threading.Event()
        self._flowing.set()
        self._delay = 0.0
        self._piece_bytes = _PIECE_BYTES
        self._refusing = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._pauses = threading.Event()
        threading.Thread(target=self._listen, name="relay", daemon=True).start()

    # -- what goes wrong -----------------------------------------------------------------------

    def at(self, byte: int, fault: Fault) -> None:
        """Let a fault happen once so many bytes have gone up."""
        self._at = byte, fault

    def cut(self) -> None:
        """Cut all connections, both ways."""
        for pair in self._taken():
            for one in pair:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def half_close(self) -> None:
        """Tell the worker that nothing follows, and go on in the other direction."""
        for _, server in self._taken():
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)

    def freeze(self) -> None:
        """Let nothing through any more, and say so to nobody."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Let everything through again, first of all what came meanwhile."""
        self._flowing.set()

    def corrupt(self) -> None:
        """Turn over a bit of the byte that comes next."""
        self._corrupt = True

    def slow_down(self, seconds: float) -> None:
        """Hold each piece for a while."""
        self._delay = seconds

    def throttle(self, piece_bytes: int) -> None:
        """Forward pieces of at most so many bytes from the next one on."""
        self._piece_bytes = piece_bytes

    def heal(self) -> None:
        """Let everything through as it comes; what was cut stays so."""
        self._at = None
        self._corrupt = False
        self._delay = 0.0
        self._piece_bytes = _PIECE_BYTES
        self._refusing = False
        self.reached.clear()
        self.bytes_up = 0
        self.thaw()

    def refuse(self) -> None:
        """Take no new connections."""
        self._refusing = True

    def accept(self) -> None:
        """Take new connections again."""
        self._refusing = False

    # -- how it runs ---------------------------------------------------------------------------

    def close(self) -> None:
        """Stop, and cut all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.thaw()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _taken(self) -> list[tuple[socket.socket, socket.socket]]:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        return pairs

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                server = self._connect()
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs = [pair for pair in self._pairs if pair[0].fileno() >= 0]
                self._pairs.append((client, server))
            for name, ends in (("up", (client, server)), ("down", (server, client))):
                threading.Thread(target=self._pump, args=(*ends, name), daemon=True).start()

    def _connect(self) -> socket.socket:
        if self.to.startswith("unix:"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(self.to.removeprefix("unix://"))
            return server
        host, _, port = self.to.rpartition(":")
        return socket.create_connection((host, int(port)))

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(self._piece_bytes):
                if self._delay:
                    self._pauses.wait(self._delay)
                self._flowing.wait()
                self._forward(data, sink, way)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _forward(self, data: bytes, sink: socket.socket, way: str) -> None:
        if way == "up" and self._at is not None:
            byte, fault = self._at
            rest = byte - self.bytes_up
            if rest < len(data):
                self._at = None
                sink.sendall(data[:rest])
                fault(self)
                self.reached.set()
                self._flowing.wait()
                data, self.bytes_up = data[rest:], self.bytes_up + rest
        if way == "up" and self._corrupt:
            self._corrupt = False
            data = bytes([data[0] ^ 0x10]) + data[1:]
        sink.sendall(data)
        if way == "up":
            self.bytes_up += len(data)
