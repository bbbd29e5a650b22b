from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from weightsync_client import Fleet  # noqa: E402

from tests.client.live import tiny  # noqa: E402
from weightsync.core.errors import EngineUnavailableError, InvalidRequestError  # noqa: E402
from weightsync.core.rankfile import RankFile  # noqa: E402
from weightsync.server.serve import serve  # noqa: E402
from weightsync.server.server import Server  # noqa: E402


def rank_file(server: Server, rank: int) -> RankFile:
    """Return what a rank of two writes down."""
    return RankFile(rank, 2, rank, 1, server.address, server.worker.instance_id)


def test_a_fleet_is_found_by_its_directory(tmp_path: Path) -> None:
    """The fleet has all ranks, in their order."""
    with serve(tiny(0)) as first, serve(tiny(1)) as second:
        rank_file(second, 1).write(tmp_path)
        rank_file(first, 0).write(tmp_path)
        with Fleet.from_vllm(tmp_path) as fleet:
            assert [w.address for w in fleet.workers] == [first.address, second.address]


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    """A directory that stays incomplete is named."""
    with serve(tiny(0)) as first:
        rank_file(first, 0).write(tmp_path)
        with pytest.raises(EngineUnavailableError, match=tmp_path.name):
            Fleet.from_vllm(tmp_path, timeout=0.0)


def test_another_service_at_an_old_address_is_noticed(tmp_path: Path) -> None:
    """A file of an engine that is gone does not lead to whoever has its port now."""
    with serve(tiny(0)) as first:
        replace(rank_file(first, 0), world_size=1, instance_id="gone").write(tmp_path)
        with pytest.raises(InvalidRequestError, match="gone"):
            Fleet.from_vllm(tmp_path)
