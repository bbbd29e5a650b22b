"""Make equal weights of a verifier and its draft one storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from weightsync.core.errors import IncompleteError
from weightsync.loader.decide import Decision, decide
from weightsync.loader.draft import Draft
from weightsync.loader.equals import equal_pairs
from weightsync.loader.places import Place
from weightsync.loader.report import Pair, SharingReport, Tie
from weightsync.loader.sites import find_sites
from weightsync.loader.slots import Slots, storage_sizes
from weightsync.loader.wrappers import Model, unwrap

ALL_PLACES = frozenset(Place) - {Place.OTHER}
"""The places that are looked at if the caller names none."""


@torch.no_grad()
def share_identical_weights(
    verifier: Model,
    draft: Model,
    *,
    places: Collection[Place] = ALL_PLACES,
    all_equal: bool = False,
    exclude: Collection[str] = (),
    missing: Collection[str] = (),
    prefer_view: bool = False,
    equal_only: bool = False,
    dry_run: bool = False,
) -> SharingReport:
    """Let the draft hold the verifier's tensors wherever it has none of its own or equal ones.

    Both models must be completely loaded: a tensor on the meta device, or named in `missing`, has
    no content. The draft shares without a look at values where it has no content, or where its
    flag (`has_own_embed_tokens`, `has_own_lm_head`) is False; everywhere else exactly where the
    bytes are equal. The verifier is never changed, and the draft only once all is decided.

    Args:
        verifier: The verifier, or a wrapper around it.
        draft: The draft, or a wrapper around it.
        places: Where to look.
        all_equal: Also share any other parameter of the draft that equals one of the verifier.
        exclude: Names, or patterns as in a shell (`*.lm_head.weight`), not to be shared: of the
            draft's tensors or of the verifier's.
        missing: Names of the draft's tensors that its checkpoint did not carry. A tied tensor is
            missing only if all its names are.
        prefer_view: Give the draft's own `Parameter` objects the verifier's storage, for engines
            that need these objects. Without it both hold one object, which is the safer tie. A
            parameter on the meta device is always replaced.
        equal_only: Heed no flag and fill no empty place, but share equal bytes: for engines that
            have done the former themselves. What has no content is left alone.
        dry_run: Change nothing; the report says what would be shared.

    Returns:
        Each pair that was looked at, and what became of it.

    Raises:
        IncompleteError: the verifier has a tensor without content, or the draft has one that it
            can't share. Nothing was changed.
        InvalidRequestError: a model is no torch module, nor a wrapper of one.
        UnknownTensorError: a missing name is no name of the draft.
    """
    verifier, draft = unwrap(verifier), unwrap(draft)
    own = Slots(verifier)
    if not equal_only:
        _require_content("verifier", [slot.name for slot, tensor in own.items() if tensor.is_meta])
    others = Draft(
        Slots(draft),
        missing=missing,
        exclude=exclude,
        prefer_view=prefer_view,
        equal_only=equal_only,
    )
    sites = list(find_sites(verifier, draft, places, declared=not equal_only))
    decisions = list(decide(sites, others))
    if all_equal:
        decisions += equal_pairs(own, others, sites)
    if not equal_only:
        given = [slot for decision in decisions for slot in decision.slots]
        _require_content("draft", others.without_content(given))
    report = SharingReport(tuple(_measured(decisions, own, others.slots)))
    for decision in () if dry_run else decisions:
        _apply(decision)
    return report


def _require_content(model: str, names: Sequence[str]) -> None:
    if names:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")  # noqa: PLR2004
        remedy = (
            "load it completely before sharing"
            if model == "verifier"
            else "its checkpoint must carry them, since the verifier can't lend them"
        )
        raise IncompleteError(
            f"{len(names)} tensors of the {model} were never loaded: {shown}; {remedy}",
            subjects=names[:10],
            missing=str(len(names)),
        )


def _measured(decisions: Iterable[Decision], verifier: Slots, draft: Slots) -> Iterator[Pair]:
    """Return the pairs with the bytes of those storages that nobody will hold any more."""
    decisions = list(decisions)
    given = {slot.key for decision in decisions for slot in decision.slots}
    kept = storage_sizes(tensor for _, tensor in verifier.items())
    kept |= storage_sizes(tensor for slot, tensor in draft.items() if slot.key not in given)
    for decision in decisions:
        tensors = (slot.tensor for slot in decision.slots)
        freed = storage_sizes(tensor for tensor in tensors if tensor is not None)
        saved = sum(size for key, size in freed.items() if key not in kept)
        kept |= freed  # counted once
        yield replace(decision.pair, bytes_saved=saved)


def _apply(decision: Decision) -> None:
    for slot in decision.slots:
        tensor = slot.tensor
        if decision.source is None or tensor is decision.source:
            continue
        if (
            decision.pair.tie is Tie.VIEW
            and tensor is not None
            and isinstance(decision.source, torch.Tensor)
        ):
            tensor.data = decision.source.data
        else:
            slot.put(decision.source)
