"""Servers with certificates and tokens, around two tiny models."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import weightsync
from tests.security.authority import Authority, Tokens
from weightsync.server.logs import LogFormat, make_logger
from weightsync.server.server import Server
from weightsync.testing.models import Tiny, tiny_pair

Start = Callable[..., Server]


@pytest.fixture
def models() -> tuple[Tiny, Tiny]:
    """A verifier and a draft."""
    return tiny_pair()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Signs the certificates that are good."""
    return Authority(tmp_path)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    """The tokens that are good."""
    return Tokens(tmp_path / "tokens.json")


@pytest.fixture
def log() -> io.StringIO:
    """What the servers log, as JSON lines."""
    return io.StringIO()


@pytest.fixture
def start(log: io.StringIO, models: tuple[Tiny, Tiny]) -> Iterator[Start]:
    """Start servers that stop after the test."""
    with ExitStack() as stack:

        def start(**options: Any) -> Server:
            logger = make_logger(LogFormat.JSON, log, logging.DEBUG)
            server = weightsync.serve(*models, log=logger, **options)
            stack.callback(server.stop, 0.0)
            return server

        yield start
