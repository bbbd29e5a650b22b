"""What verifier and draft of a worker hold together: by vLLM, and what it missed.

vLLM gives a draft the verifier's embedding and head where the draft's checkpoint has none, or, for
some methods, an equal one. It does so before this service starts. Whatever else is equal is made
one here, parameter by parameter: models may refer to a module from elsewhere, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weightsync.loader import Place, SharingReport, Verdict, check_ties, share_identical_weights

if TYPE_CHECKING:
    from torch import nn

# Scratch space for indices is not weights; vLLM hands it on where one layout serves both models.
_PLACES = frozenset({Place.INPUT_EMBEDDING, Place.OUTPUT_HEAD, Place.LAYER_HEAD})


@dataclass(frozen=True, slots=True)
class Sharing:
    """Two models, and what they were found to hold together.

    Attributes:
        verifier: The verifier.
        draft: The draft.
        report: Each pair; those that vLLM made one are `already`.
    """

    verifier: nn.Module
    draft: nn.Module
    report: SharingReport

    def check(self) -> None:
        """Look at the models as they are now.

        Raises:
            SharedWeightError: what was one storage is not any more.
        """
        check_ties(self.report, self.verifier, self.draft)

    def without(self, names: Collection[str]) -> Sharing:
        """Return what is left when some of the draft's tensors have been cut off."""
        pairs = tuple(
            replace(pair, draft=tuple(name for name in pair.draft if name not in names))
            for pair in self.report.pairs
            if not pair.draft or set(pair.draft) - set(names)
        )
        return replace(self, report=SharingReport(pairs))

    def facts(self) -> Iterator[dict[str, object]]:
        """Return what logs tell: of each pair, sizes in bytes."""
        for pair in self.report.pairs:
            made_by = "vllm" if pair.verdict is Verdict.ALREADY else "weightsync"
            yield {
                "place": str(pair.place),
                "verifier": pair.verifier,
                "draft": ", ".join(pair.draft) or None,
                "verdict": str(pair.verdict),
                "shared_by": made_by if pair.verdict.shared else None,
                "reason": pair.reason,
                "num_bytes": pair.num_bytes,
                "bytes_saved": pair.bytes_saved,
            }


def find_sharing(
    verifier: nn.Module,
    draft: nn.Module,
    *,
    widen: bool,
    group: dist.ProcessGroup,
) -> Sharing:
    """Find what two models share, and let them share what is equal.

    All ranks of `group` call this, and share the same names: where the part of one rank differs,
    none shares. No forward pass may run, nor may a graph have been captured.

    Args:
        verifier: Loaded.
        draft: Loaded.
        widen: Let them share more than vLLM did.
        group: The ranks that hold parts of these models, in host memory.
    """
    # Flags say here what vLLM has acted on, and a standalone draft has them without meaning them.
    found = share_identical_weights(verifier, draft, places=_PLACES, equal_only=True, dry_run=True)
    exclude = _equal_somewhere(found, group) if widen else _found_equal(found)
    report = share_identical_weights(
        verifier, draft, places=_PLACES, equal_only=True, exclude=exclude
    )
    return Sharing(verifier, draft, report)


def _found_equal(report: SharingReport) -> Collection[str]:
    """Return the draft's names that are equal to the verifier's, and not one with them."""
    pairs = (pair for pair in report.shared if pair.verdict is not Verdict.ALREADY)
    return {name for pair in pairs for name in pair.draft}


def _equal_somewhere(report: SharingReport, group: dist.ProcessGroup) -> Collection[str]:
    """Return the draft's names that are equal on some ranks, but not on all; the same on each."""
    num_equal = torch.tensor([pair.verdict.shared for pair in report.pairs], dtype=torch.int32)
    if group.size() > 1:
        dist.all_reduce(num_equal, dist.ReduceOp.SUM, group)
    return {
        name
        for pair, ranks in zip(report.pairs, num_equal.tolist(), strict=True)
        if 0 < ranks < group.size()
        for name in pair.draft
    }
