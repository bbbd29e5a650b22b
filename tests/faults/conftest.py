"""A worker process per kind of address, shared by the tests of a file: it survives all of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.trio import Trio
from weightsync.testing.faults.processes import WorkerProcess
from weightsync.testing.faults.scene import Scene


def addresses(folder: Path) -> dict[str, str]:
    """Return an address of each kind."""
    return {"tcp": "127.0.0.1:0", "unix": f"unix://{folder}/worker.sock"}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scene]]:
    """Workers over TCP and over a unix socket, started together."""
    folder = tmp_path_factory.mktemp("faults")
    workers = {kind: WorkerProcess(address) for kind, address in addresses(folder).items()}
    with workers["tcp"], workers["unix"]:
        scenes = {kind: Scene(worker) for kind, worker in workers.items()}
        yield scenes
        for scene in scenes.values():
            scene.close()


@pytest.fixture
def scene(scenes: dict[str, Scene], request: pytest.FixtureRequest) -> Scene:
    """One of them: the faults come over both kinds of address in turn."""
    turn = zlib.crc32(request.node.name.encode()) % len(scenes)
    return list(scenes.values())[turn]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Three workers that hold the same; each test leaves them so."""
    with ExitStack() as stack:
        yield Trio(tmp_path_factory.mktemp("fleet"), stack)
