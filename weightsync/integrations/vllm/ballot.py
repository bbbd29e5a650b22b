"""What ranks tell each other in the middle of a commit."""

from __future__ import annotations

import torch
import torch.distributed as dist

_TEXT_BYTES = 512


class Ballot:
    """One vote of all ranks, in which each rank takes part exactly once, at its own time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Open the vote; `group` reaches all ranks, in host memory."""
        self._group = group
        self._troubles: list[str] | None = None

    @property
    def over(self) -> bool:
        """Tell whether this rank has voted."""
        return self._troubles is not None

    def cast(self, trouble: str = "") -> list[str]:
        """Say what is in this rank's way, or nothing; wait for the others.

        A vote is never changed: who votes again hears the result once more.

        Returns:
            What is in the way of each rank that has trouble, the rank first.
        """
        if self._troubles is None:
            text = trouble.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
            mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            votes = [torch.empty_like(mine) for _ in range(self._group.size())]
            dist.all_gather(votes, mine, self._group)
            texts = [bytes(vote.tolist()).rstrip(b"\0").decode(errors="ignore") for vote in votes]
            self._troubles = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        return self._troubles
