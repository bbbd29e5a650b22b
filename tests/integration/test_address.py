from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from weightsync.core.errors import InvalidRequestError
from weightsync.server.address import bind, is_local, socket_path, split_host_port


@pytest.fixture
def server() -> Iterator[grpc.Server]:
    """A server that listens nowhere yet."""
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        yield server
        server.stop(None)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:8080", ("localhost", 8080)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    """Host names, IPv4 and bracketed IPv6 addresses come with a port."""
    assert split_host_port(address) == parts


@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":80", "::1:80", "[::1]", "localhost:65536", "localhost:-1", "http://a:80",
     "a:b:80", "[localhost]:80", "localhost:8 0"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    """An address that is none is refused with the forms that are."""
    with pytest.raises(InvalidRequestError, match=r"unix:///PATH"):
        split_host_port(address)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:///run/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("host.example:1", False),
    ],
)
def test_only_loopback_and_unix_sockets_are_local(address: str, *, local: bool) -> None:
    """An address is local only if no other host can reach it."""
    assert is_local(address) is local


def test_a_reachable_address_needs_the_flag(server: grpc.Server) -> None:
    """A TCP address that other hosts can reach is refused unless it is asked for."""
    with pytest.raises(InvalidRequestError, match="allow_insecure"):
        bind(server, "0.0.0.0:0")
    assert bind(server, "0.0.0.0:0", allow_insecure=True).startswith("0.0.0.0:")


def test_port_zero_becomes_the_actual_port(server: grpc.Server) -> None:
    """A free port is chosen and told."""
    host, port = split_host_port(bind(server, "127.0.0.1:0"))
    assert host == "127.0.0.1"
    assert port > 0


def test_a_taken_port_is_refused(server: grpc.Server) -> None:
    """A second server on one port fails loudly."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InvalidRequestError, match=f"127.0.0.1:{port}"):
            bind(server, f"127.0.0.1:{port}")


@pytest.mark.parametrize("name", ["plain.sock", "with space.sock", "100%.sock", "a%20b.sock"])
def test_unix_sockets_lie_in_private_folders(
    server: grpc.Server, tmp_path: Path, name: str
) -> None:
    """The folder is made for its owner only, and the path is taken as it is (B84)."""
    path = tmp_path / "run" / name
    assert bind(server, f"unix://{path}") == f"unix://{path}"
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_dead_servers_socket_is_replaced(server: grpc.Server, tmp_path: Path) -> None:
    """The socket file that a killed server left behind is in nobody's way (B84)."""
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert bind(server, f"unix://{path}") == f"unix://{path}"


def test_a_live_servers_socket_is_refused(server: grpc.Server, tmp_path: Path) -> None:
    """A socket on which somebody answers is not taken over."""
    path = tmp_path / "live.sock"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(InvalidRequestError, match="another server"):
            bind(server, f"unix://{path}")
    assert path.exists()


def test_a_file_in_place_of_the_socket_is_kept(server: grpc.Server, tmp_path: Path) -> None:
    """A file that is no socket is never removed."""
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(InvalidRequestError, match="no socket"):
        bind(server, f"unix://{path}")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("address", ["unix:relative.sock", "unix://" + "/x" * 54])
def test_impossible_socket_paths_are_refused(address: str) -> None:
    """A relative path, or one of more than 107 bytes, is refused before the system is asked."""
    with pytest.raises(InvalidRequestError, match=r"path"):
        socket_path(address)


def test_the_longest_socket_path_works(server: grpc.Server, tmp_path: Path) -> None:
    """A path of exactly 107 bytes is fine (B84)."""
    path = Path("/tmp") / tmp_path.name  # noqa: S108 - pytest's own folder may be too long
    path /= "x" * (106 - len(str(path)))
    try:
        assert bind(server, f"unix://{path}") == f"unix://{path}"
    finally:
        path.unlink(missing_ok=True)
        path.parent.rmdir()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
def test_a_folder_that_others_can_write_is_refused(
    server: grpc.Server, tmp_path: Path, mode: int
) -> None:
    """Where others could put their own socket in place of ours, there is none."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InvalidRequestError, match="others can write"):
        bind(server, f"unix://{folder}/w.sock")
    assert bind(server, f"unix://{folder}/below/w.sock")


def test_a_folder_of_another_user_is_refused(server: grpc.Server, tmp_path: Path) -> None:
    """A folder that somebody else owns is no place for a socket."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    try:
        os.chown(folder, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can give a folder away")
    with pytest.raises(InvalidRequestError, match="another user"):
        bind(server, f"unix://{folder}/w.sock")
