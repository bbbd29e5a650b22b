"""Where the ranks of one engine listen: a file per rank in a directory that clients can read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from weightsync.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class RankFile:
    """What `rank{rank}.json` says.

    Attributes:
        rank: Rank of the worker.
        world_size: Number of ranks.
        tp_rank: Its place in its tensor parallel group.
        pid: Its process.
        address: Where it listens.
        instance_id: Of the service, as GetWorker says it.
    """

    rank: int
    world_size: int
    tp_rank: int
    pid: int
    address: str
    instance_id: str

    def write(self, directory: Path) -> None:
        """Write the file; a reader never sees a part of it."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank{self.rank}.json"
        unfinished = path.with_suffix(f".{os.getpid()}.new")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(path)

    @classmethod
    def read_all(cls, directory: Path) -> list[RankFile] | None:
        """Return the files of all ranks, by rank; None while some are missing.

        Raises:
            InvalidRequestError: a file is none of these.
        """
        found: dict[int, RankFile] = {}
        for path in directory.glob("rank*.json"):
            try:
                one = cls(**json.loads(path.read_text()))
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(
                    f"{path} does not say where a rank listens: {error}", subjects=["directory"]
                ) from error
            found[one.rank] = one
        # Ranks beyond the world are left from an engine that had more of them.
        size = found[0].world_size if 0 in found else 1
        ranks = [found[rank] for rank in range(size) if rank in found]
        return ranks if len(ranks) == size else None
