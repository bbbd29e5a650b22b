"""What the machine does without any service: a copy in memory, and a bare TCP socket."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Bytes = npt.NDArray[np.uint8]


def parameter_bytes(module: nn.Module) -> list[Bytes]:
    """Return the memory of each parameter."""
    return [p.detach().view(-1).view(torch.uint8).numpy() for p in module.parameters()]


class Memcpy:
    """Copies arrays into memory that is there already, in some threads."""

    def __init__(self, arrays: Sequence[Bytes], num_threads: int) -> None:
        """Split the bytes evenly; the interpreter is free while numpy copies."""
        pairs = [(a, np.ones_like(a)) for a in arrays]
        self._shares = [
            [
                (np.array_split(source, num_threads)[i], np.array_split(dest, num_threads)[i])
                for source, dest in pairs
            ]
            for i in range(num_threads)
        ]
        self._threads = ThreadPoolExecutor(num_threads)

    def __call__(self) -> None:
        """Copy everything once."""
        list(self._threads.map(_copy, self._shares))


def _copy(share: Sequence[tuple[Bytes, Bytes]]) -> None:
    for source, dest in share:
        np.copyto(dest, source)


class Tcp:
    """Sends arrays to a `tcp_peer`."""

    def __init__(self, arrays: Sequence[Bytes], port: int) -> None:
        """Send to a port of this host."""
        self._arrays = arrays
        self._port = port

    def __call__(self) -> None:
        """Send everything once and wait until it has arrived."""
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            for array in self._arrays:
                connection.sendall(array.data)
            if connection.recv(1) != b"!":
                raise ConnectionError("the peer went before it had everything")

    def close(self) -> None:
        """End the peer: a connection that brings nothing."""
        socket.create_connection(("127.0.0.1", self._port)).close()
