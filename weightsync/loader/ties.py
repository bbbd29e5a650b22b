"""Whether what was shared is still one storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weightsync.core.errors import SharedWeightError
from weightsync.loader.compare import view_key
from weightsync.loader.report import SharingReport, Tie
from weightsync.loader.wrappers import Model, unwrap


@dataclass(frozen=True, slots=True)
class LostTie:
    """A shared tensor that is no longer one.

    Attributes:
        verifier: Name in the verifier.
        draft: Name in the draft.
        reason: What is seen instead.
    """

    verifier: str
    draft: str
    reason: str

    def __str__(self) -> str:
        return f"draft {self.draft} / verifier {self.verifier}: {self.reason}"


def lost_ties(report: SharingReport, verifier: Model, draft: Model) -> tuple[LostTie, ...]:
    """Return the shared tensors that are no longer one; empty if all is well.

    A pair that was shared as one object must still be one object, and each pair one view of one
    storage. Looks at objects and addresses only, so it is quick enough to run after each commit.
    """
    return tuple(_lost(report, unwrap(verifier), unwrap(draft)))


def check_ties(report: SharingReport, verifier: Model, draft: Model) -> None:
    """Raise if a shared tensor is no longer one.

    Raises:
        SharedWeightError: names each tie that was lost.
    """
    if lost := lost_ties(report, verifier, draft):
        raise SharedWeightError(
            "verifier and draft no longer hold one storage: " + "; ".join(map(str, lost)) + "; "
            "write into the parameters instead of replacing them, or share them again",
            subjects=[tie.draft for tie in lost],
        )


def _lost(report: SharingReport, verifier: nn.Module, draft: nn.Module) -> Iterator[LostTie]:
    for pair in report.shared:
        if pair.verifier is None:
            continue
        source = _resolve(verifier, pair.verifier)
        for name in pair.draft:
            tensor = _resolve(draft, name)
            if source is None or tensor is None:
                owner = "verifier" if source is None else "draft"
                yield LostTie(pair.verifier, name, f"the {owner} has no such tensor any more")
            elif view_key(source) != view_key(tensor):
                yield LostTie(pair.verifier, name, "two storages")
            elif (
                pair.tie is Tie.OBJECT and isinstance(tensor, nn.Parameter) and tensor is not source
            ):
                yield LostTie(pair.verifier, name, "two parameters over one storage")


def _resolve(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, attribute = name.rpartition(".")
    try:
        tensor = getattr(model.get_submodule(path), attribute, None)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, torch.Tensor) else None
