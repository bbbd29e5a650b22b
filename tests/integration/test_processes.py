"""What surrounds a worker's process: proxies, and warnings that are errors."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.process import run
from weightsync.testing.models import Tiny, tiny_pair

PUSH = """
import os
import torch
from weightsync.testing.models import Tiny
from weightsync_client import push_model
report = push_model(os.environ["ADDRESS"], Tiny(), version="v1")
tell(committed=report.committed)
"""

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_proxy_is_not_asked_for_what_is_local(start: Start, kind: str, tmp_path: Path) -> None:
    """B83: with a dead proxy in the environment, a trainer still reaches a worker of its host."""
    address = "127.0.0.1:0" if kind == "tcp" else f"unix://{tmp_path}/worker.sock"
    server = start(Tiny(), address=address)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    proxies = dict.fromkeys(PROXIES, dead)
    assert run(PUSH, ADDRESS=server.address, no_proxy="", NO_PROXY="", **proxies) == {
        "committed": True
    }


def test_received_bytes_are_never_written(start: Start) -> None:
    """B87: a whole update with every warning an error, that of read-only buffers among them."""
    server = start(*tiny_pair(shared=False))
    # The program runs with -W error; so do these tests, in whose process the worker runs.
    assert run(PUSH, ADDRESS=server.address) == {"committed": True}
