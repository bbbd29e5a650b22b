"""Where a server listens: what is allowed, and what it got."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat
from pathlib import Path
from urllib.parse import quote

import grpc

from weightsync.core.errors import InvalidRequestError

MAX_PORT = 65535

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket on Linux."""


def bind(
    server: grpc.Server,
    address: str,
    *,
    allow_insecure: bool = False,
    credentials: grpc.ServerCredentials | None = None,
    tokens: bool = False,
) -> str:
    """Make a server listen, and return the address with its actual port.

    Args:
        server: Not yet started.
        address: `HOST:PORT`, port 0 for a free one, or `unix:///PATH` (the path as it is, not
            percent-encoded).
        allow_insecure: Allow a TCP address that other hosts can reach without TLS; everybody who
            can may then read and replace the weights.
        credentials: For TLS.
        tokens: Callers send tokens, which others must not be able to read on their way.

    Raises:
        InvalidRequestError: no such address, not allowed, or taken.
    """
    if address.startswith("unix:"):
        if credentials is not None:
            raise InvalidRequestError(
                f"{address} never leaves this host and has no TLS; leave out tls_certificate,"
                " tls_key and tls_client_ca, or listen on HOST:PORT",
                subjects=["address", "tls_certificate"],
            )
        return _bind_unix(server, socket_path(address))
    host, port = split_host_port(address)
    if credentials is None and not is_loopback(host):
        _check_plain_text(address, allow_insecure=allow_insecure, tokens=tokens)
    shown = f"[{host}]" if ":" in host else host
    try:
        actual = (
            server.add_insecure_port(f"{shown}:{port}")
            if credentials is None
            else server.add_secure_port(f"{shown}:{port}", credentials)
        )
    except RuntimeError as error:
        raise _taken(address) from error
    return f"{shown}:{actual}"


def _check_plain_text(address: str, *, allow_insecure: bool, tokens: bool) -> None:
    if tokens:
        raise InvalidRequestError(
            f"{address} can be reached from other hosts, and without TLS everybody on the way could"
            " read the callers' tokens; give tls_certificate and tls_key, or listen on 127.0.0.1 or"
            " a unix socket",
            subjects=["address", "tokens"],
        )
    if not allow_insecure:
        raise InvalidRequestError(
            f"{address} can be reached from other hosts, and nothing here asks them who they are;"
            " give tls_certificate and tls_key, listen on 127.0.0.1 or a unix socket, or say"
            " allow_insecure",
            subjects=["address"],
        )


def is_local(address: str) -> bool:
    """Tell whether only this host can reach an address."""
    return address.startswith("unix:") or is_loopback(split_host_port(address)[0])


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address means this host only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_host_port(address: str) -> tuple[str, int]:
    """Split `HOST:PORT`; IPv6 hosts stand in brackets.

    Raises:
        InvalidRequestError: it is something else.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/]+)):([0-9]{1,5})", address)
    if match is None or int(match[3]) > MAX_PORT:
        raise InvalidRequestError(
            f"{address!r} is no address; write HOST:PORT, [IPV6]:PORT or unix:///PATH",
            subjects=["address"],
        )
    return match[1] or match[2], int(match[3])


def socket_path(address: str) -> Path:
    """Return the absolute path of a `unix:` address.

    Raises:
        InvalidRequestError: it is not absolute, or too long for the system.
    """
    path = address.removeprefix("unix:").removeprefix("//")
    if not path.startswith("/"):
        raise InvalidRequestError(
            f"{address!r} has no absolute path; write unix:///PATH", subjects=["address"]
        )
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidRequestError(
            f"the path of {address!r} is longer than the {MAX_SOCKET_PATH_BYTES} bytes that the"
            " system allows for a socket; choose a shorter one",
            subjects=["address"],
        )
    return Path(path)


def _bind_unix(server: grpc.Server, path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path.parent)
    _remove_stale(path)
    try:
        # gRPC reads the path as part of a URI.
        server.add_insecure_port(f"unix:{quote(str(path))}")
    except RuntimeError as error:
        raise _taken(f"unix://{path}") from error
    path.chmod(0o600)
    return f"unix://{path}"


def _check_private(folder: Path) -> None:
    """Refuse a folder in which others could put a socket of their own in place of ours."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise InvalidRequestError(
            f"{folder} belongs to another user, who could replace the socket; choose a folder of"
            " your own",
            subjects=["address"],
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequestError(
            f"others can write to {folder} (mode {stat.S_IMODE(found.st_mode):04o}) and so replace"
            " the socket; choose a folder below it, which is made with mode 0700, or take their"
            " right to write away",
            subjects=["address"],
        )


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a dead server; gRPC by itself would also take a live one's."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise InvalidRequestError(
            f"{path} exists and is no socket; choose another path", subjects=["address"]
        )
    with socket.socket(socket.AF_UNIX) as probe:
        # A server with a full backlog makes a blocking connect wait; it is alive all the same.
        probe.setblocking(False)  # noqa: FBT003
        answer = probe.connect_ex(str(path))
    if answer == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
    elif answer != errno.ENOENT:
        raise _taken(f"unix://{path}")


def _taken(address: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"can't listen on {address}: another server has it, or this host has no such address;"
        " stop that server, or choose another address",
        subjects=["address"],
    )
