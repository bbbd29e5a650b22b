"""Ranks that all do a thing, or none of them."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Ballot:
    """One vote of all ranks, in which each rank takes part exactly once, at its own time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Open the vote, over the processors' network."""
        self._group = group
        self._open = True

    def cast(self, *, ok: bool) -> bool:
        """Say whether this rank could; wait for the others, and return whether all could.

        A vote that is cast already is not changed: it then returns `ok`.
        """
        if not self._open:
            return ok
        self._open = False
        vote = torch.tensor([int(ok)])
        dist.all_reduce(vote, dist.ReduceOp.MIN, self._group)
        return bool(vote.item())
