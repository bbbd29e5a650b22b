"""A worker around two tiny models that share embedding and head."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import Tiny, tiny_pair


@pytest.fixture
def models() -> tuple[Tiny, Tiny]:
    """A verifier, and a draft with the verifier's embedding and head."""
    return tiny_pair()


@pytest.fixture
def worker(models: tuple[Tiny, Tiny]) -> Iterator[Worker]:
    """A worker that holds both."""
    verifier, draft = models
    worker = Worker(ModuleEngine(verifier, draft))
    yield worker
    worker.close()
