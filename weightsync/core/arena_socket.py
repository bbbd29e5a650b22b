"""What both ends of the socket that hands out arenas agree on."""

from __future__ import annotations

import os
import socket
import struct

PREFIX = "weightsync-"
"""What the names of workers' sockets begin with: clients speak to no other socket."""

LONGEST_LINE = 128
"""Most bytes of a line, in both directions."""

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: `struct ucred` of Linux


def is_same_user(connection: socket.socket) -> bool:
    """Tell whether the process at the other end of a unix socket is this one's user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())
