"""A worker with metrics, and what can happen to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weightsync_client import push_model

import weightsync
from weightsync.server.server import Server
from weightsync.testing.models import Tiny, tiny_pair


@pytest.fixture
def models() -> tuple[Tiny, Tiny]:
    """A verifier and a draft with the verifier's embedding and head."""
    return tiny_pair()


@pytest.fixture
def server(models: tuple[Tiny, Tiny]) -> Iterator[Server]:
    """A worker that holds version v1."""
    with weightsync.serve(*models, metrics_port=0) as server:
        push_model(server.address, *tiny_pair(seed=1), version="v1")
        yield server
