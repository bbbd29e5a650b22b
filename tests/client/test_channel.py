from __future__ import annotations

import subprocess
import sys

import pytest
from weightsync_client.channel import _options, _target

from weightsync.core.errors import InvalidRequestError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:///run/w"])
def test_no_proxy_for_what_only_this_host_reaches(address: str) -> None:
    """B83: loopback and unix sockets are reached directly, others as the environment says."""
    assert ("grpc.enable_http_proxy", 0) in _options(address)
    assert ("grpc.enable_http_proxy", 0) not in _options("10.0.0.1:1")


def test_unix_paths_are_coded_and_the_authority_is_plain() -> None:
    """B84: a path may hold what a URI may not, and is not sent as authority."""
    assert _target("unix:///run/a b%/w#1?.sock") == "unix:/run/a%20b%25/w%231%3F.sock"
    assert ("grpc.default_authority", "localhost") in _options("unix:///run/w.sock")


@pytest.mark.parametrize("address", ["", "host", "host:", ":50051", "host:port", "http://h"])
def test_a_bad_address_is_told(address: str) -> None:
    """What is neither HOST:PORT nor a unix path is refused before anything is connected."""
    with pytest.raises(InvalidRequestError, match="HOST:PORT"):
        _target(address)


def test_pings_fit_what_servers_allow() -> None:
    """B78: a minute between pings, and none without a call."""
    options = dict(_options("127.0.0.1:1"))
    assert options["grpc.keepalive_time_ms"] == 60_000
    assert options["grpc.keepalive_permit_without_calls"] == 0


def test_importing_the_package_loads_neither_grpc_nor_torch() -> None:
    """B82: names are loaded when they are used; each that is promised exists."""
    code = (
        "import sys, weightsync_client as c; "
        "assert not {'grpc', 'torch', 'numpy', 'google'} & set(sys.modules); "
        "[getattr(c, n) for n in c.__all__]; "
        "assert 'torch' not in sys.modules; "
        "assert set(c.__all__) <= set(dir(c))"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=env)
