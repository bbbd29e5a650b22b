"""Where the ranks of one engine listen: a file per rank in a directory that clients can read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from weightsync.core.errors import InvalidRequestError, UnsupportedError


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
    def parse(cls, content: object, origin: str) -> RankFile:
        """Return what was read somewhere.

        Raises:
            InvalidRequestError: it is something else.
        """
        if isinstance(content, dict):
            known = {f.name: f.type for f in fields(cls)}
            kinds = {name: type(value).__name__ for name, value in content.items()}
            if kinds == known:
                return cls(**content)
        raise InvalidRequestError(
            f"{origin} does not say where a rank listens: {content!r:.200}", subjects=["directory"]
        )

    @classmethod
    def parse_all(cls, contents: Sequence[object], origin: str) -> list[RankFile]:
        """Return what all ranks of an engine have answered, in their order.

        Raises:
            InvalidRequestError: an answer is something else.
            UnsupportedError: there are more ranks, which were not asked.
        """
        ranks = [cls.parse(content, origin) for content in contents]
        if not ranks or len(ranks) != ranks[0].world_size:
            raise UnsupportedError(
                f"only {len(ranks)} ranks have answered at {origin}, which runs several engines;"
                " find all of them by the directory that they write to"
            )
        return ranks

    def at(self, address: str) -> RankFile:
        """Return the same with the address by which it is reached from here."""
        return replace(self, address=address)

    @classmethod
    def read_all(cls, directory: Path) -> list[RankFile] | None:
        """Return the files of all ranks, by rank; None while some are missing.

        Raises:
            InvalidRequestError: a file is none of these.
        """
        found: dict[int, RankFile] = {}
        for path in directory.glob("rank*.json"):
            try:
                content = json.loads(path.read_text())
            except ValueError as error:
                content = f"no JSON: {error}"
            one = cls.parse(content, str(path))
            found[one.rank] = one
        # Ranks beyond the world are left from an engine that had more of them.
        size = found[0].world_size if 0 in found else 1
        ranks = [found[rank] for rank in range(size) if rank in found]
        return ranks if len(ranks) == size else None
