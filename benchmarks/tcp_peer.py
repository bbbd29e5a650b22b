"""What a bare socket does: takes bytes straight into memory that is there, and acknowledges them.

Run as `python -m benchmarks.tcp_peer NBYTES`.
"""

from __future__ import annotations

import socket
import sys

import numpy as np


def main(nbytes: str) -> None:
    """Print the port; take `nbytes` from one connection after the other until one brings none."""
    memory = np.ones(int(nbytes), np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while _take(server, memory):
            pass


def _take(server: socket.socket, memory: memoryview) -> bool:
    connection, _ = server.accept()
    with connection:
        position = 0
        while position < len(memory):
            received = connection.recv_into(memory[position:])
            if not received:
                return False
            position += received
        connection.sendall(b"!")
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
