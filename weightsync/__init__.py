"""Puts new weights into running inference workers.

Importing this package imports none of torch, grpc and protobuf: the parts that need them are
imported by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.server.serve import serve
    from weightsync.server.server import Server

__version__ = "0.1.0"

__all__ = ["Server", "__version__", "serve"]


def __getattr__(name: str) -> object:
    """Import what serves only when it is asked for: a process may still want to fork (B82)."""
    if name == "serve":
        from weightsync.server.serve import serve  # noqa: PLC0415

        return serve
    if name == "Server":
        from weightsync.server.server import Server  # noqa: PLC0415

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
