"""A server around two tiny models, over both kinds of address."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from tests.integration.raw import RawTrainer, all_bits, bits
from weightsync.server.logs import LogFormat, make_logger
from weightsync.server.server import Server
from weightsync.testing.models import Tiny, tiny_pair

Start = Callable[..., Server]


@pytest.fixture
def models() -> tuple[Tiny, Tiny]:
    """A verifier and a draft with the verifier's embedding and head."""
    return tiny_pair()


@pytest.fixture
def log() -> io.StringIO:
    """What the servers log, as JSON lines."""
    return io.StringIO()


@pytest.fixture
def start(log: io.StringIO) -> Iterator[Start]:
    """Start servers that stop after the test."""
    with ExitStack() as stack:

        def start(*models: Any, **options: Any) -> Server:
            logger = make_logger(LogFormat.JSON, log, logging.DEBUG)
            server = weightsync.serve(*models, log=logger, **options)
            stack.callback(server.stop, 0.0)
            return server

        yield start


@pytest.fixture(params=["tcp", "unix"])
def server(
    request: pytest.FixtureRequest, start: Start, models: tuple[Tiny, Tiny], tmp_path: Path
) -> Server:
    """A server with both models, over TCP and over a unix socket."""
    address = "127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/worker.sock"
    return start(*models, address=address)


@pytest.fixture
def trainer(server: Server) -> Iterator[RawTrainer]:
    """A trainer that is connected to the server."""
    with RawTrainer(server.address) as trainer:
        yield trainer


@pytest.fixture
def old(models: tuple[Tiny, Tiny]) -> Iterator[None]:
    """The weights before, which must be the weights after the test, bit for bit."""
    before = [all_bits(model) for model in models]
    buffers = [bits(model.rot) for model in models]
    yield
    assert [all_bits(model) for model in models] == before
    assert [bits(model.rot) for model in models] == buffers
    assert models[1](torch.tensor([1])).isfinite().all()
