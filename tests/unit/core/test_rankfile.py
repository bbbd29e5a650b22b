from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weightsync.core.errors import InvalidRequestError
from weightsync.core.rankfile import RankFile

FIRST = RankFile(0, 2, 0, 11, "127.0.0.1:1", "a")
SECOND = replace(FIRST, rank=1, tp_rank=1, address="127.0.0.1:2", instance_id="b")


def test_ranks_are_read_in_order(tmp_path: Path) -> None:
    """All ranks together are read back, by rank, whoever wrote first."""
    SECOND.write(tmp_path)
    FIRST.write(tmp_path)
    assert RankFile.read_all(tmp_path) == [FIRST, SECOND]


def test_a_missing_rank_is_waited_for(tmp_path: Path) -> None:
    """As long as a rank has not written, nothing is returned."""
    assert RankFile.read_all(tmp_path) is None
    SECOND.write(tmp_path)
    assert RankFile.read_all(tmp_path) is None


def test_ranks_of_a_larger_engine_before_are_ignored(tmp_path: Path) -> None:
    """Files that an engine with more ranks has left behind do not count."""
    SECOND.write(tmp_path)
    alone = replace(FIRST, world_size=1)
    alone.write(tmp_path)
    assert RankFile.read_all(tmp_path) == [alone]


@pytest.mark.parametrize("text", ["", "[]", '{"rank": 0}', '{"rank": 0, "host": "x"}'])
def test_another_file_is_named(tmp_path: Path, text: str) -> None:
    """A file with other contents is an error that names it."""
    (tmp_path / "rank0.json").write_text(text)
    with pytest.raises(InvalidRequestError, match=r"rank0\.json"):
        RankFile.read_all(tmp_path)
