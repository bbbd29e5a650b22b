"""Served models for the client's tests; torch is imported only where a test asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.client.live import Live


@pytest.fixture(params=["inline", "shared memory"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    """Serve over TCP, with each way for the bytes."""
    from tests.client.live import Live  # noqa: PLC0415

    made = Live("127.0.0.1:0", shared_memory=request.param == "shared memory")
    with made.server, made.fleet:
        yield made


@pytest.fixture(params=["tcp", "unix"])
def everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Live]:
    """Serve over TCP and over a unix socket whose path needs coding."""
    from tests.client.live import Live  # noqa: PLC0415

    made = Live("127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/a b%20/w.sock")
    with made.server, made.fleet:
        yield made
