"""Sites: a tensor of the draft beside the verifier's tensor of the same role."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from torch import nn

from weightsync.loader.places import (
    Holding,
    ModulePlace,
    Place,
    find_embedding,
    find_head,
    find_index_buffers,
    find_layer_heads,
    own_copy_flag,
)
from weightsync.loader.report import Cause
from weightsync.loader.slots import Slot


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why two slots can't be one."""

    cause: Cause
    reason: str


NOT_IN_VERIFIER = Obstacle(
    Cause.NOT_IN_VERIFIER, "the verifier has none, or this pipeline stage does not own it"
)
NOT_IN_DRAFT = Obstacle(
    Cause.NOT_IN_DRAFT, "the draft has none, or this pipeline stage does not own it"
)


@dataclass(frozen=True, slots=True)
class Site:
    """Two slots that may become one.

    Attributes:
        place: Role in the models.
        verifier: The verifier's slot; None if it has none.
        draft: The draft's slot; None if it has none.
        owns: What the draft declares about a copy of its own; None if it declares nothing.
        obstacle: Why they can't be one, if the modules around them say so.
        module: The verifier's whole module, if the draft's slot is an empty one for it.
    """

    place: Place
    verifier: Slot | None
    draft: Slot | None
    owns: bool | None = None
    obstacle: Obstacle | None = None
    module: nn.Module | None = None


def find_sites(
    verifier: nn.Module,
    draft: nn.Module,
    places: Collection[Place],
    *,
    declared: bool = True,
) -> Iterator[Site]:
    """Return the sites at the named places.

    Args:
        verifier: The verifier inside its wrappers.
        draft: The draft inside its wrappers.
        places: Where to look.
        declared: Whether flags and empty places of the draft count.
    """
    for site in _all_sites(verifier, draft, places):
        if declared:
            yield site
        elif site.module is not None:
            yield replace(site, draft=None, owns=None, obstacle=NOT_IN_DRAFT, module=None)
        else:
            yield replace(site, owns=None)


def _all_sites(verifier: nn.Module, draft: nn.Module, places: Collection[Place]) -> Iterator[Site]:
    if Place.INPUT_EMBEDDING in places:
        yield from _module_sites(
            Place.INPUT_EMBEDDING, find_embedding(verifier), find_embedding(draft), draft
        )
    head = find_head(verifier)
    if Place.OUTPUT_HEAD in places:
        yield from _module_sites(Place.OUTPUT_HEAD, head, find_head(draft), draft)
    if Place.LAYER_HEAD in places:
        for layer_head in find_layer_heads(draft):
            yield from _module_sites(Place.LAYER_HEAD, head, layer_head, draft)
    if Place.INDEX_BUFFER in places:
        sources = [slot for slot in find_index_buffers(verifier) if slot.tensor is not None]
        for slot in find_index_buffers(draft):
            # Scratch space has no content worth a comparison.
            owns = None if slot.saved else False
            if sources or slot.tensor is not None:
                yield Site(Place.INDEX_BUFFER, sources[0] if sources else None, slot, owns)


def _module_sites(
    place: Place, verifier: ModulePlace | None, draft: ModulePlace | None, model: nn.Module
) -> Iterator[Site]:
    owns = own_copy_flag(model, place)
    if verifier is None or verifier.holding in (Holding.STAND_IN, Holding.EMPTY):
        if draft is not None:
            slot = draft.tensor_slot("weight") or draft.slot
            yield Site(place, None, slot, owns, NOT_IN_VERIFIER)
    elif draft is None or draft.holding is Holding.STAND_IN:
        slot = verifier.tensor_slot("weight") or verifier.slot
        yield Site(place, slot, None, owns, NOT_IN_DRAFT)
    elif draft.holding is Holding.EMPTY:
        for slot in verifier.tensor_slots():
            name = f"{draft.slot.name}.{slot.attribute}"
            target = Slot(name, draft.slot.module, draft.slot.attribute)
            yield Site(place, slot, target, owns, module=verifier.module)
    elif verifier.module is draft.module:
        for slot in verifier.tensor_slots():
            if slot.saved:
                yield Site(place, slot, draft.tensor_slot(slot.attribute), owns)
    elif Holding.PACKED in (verifier.holding, draft.holding):
        which = "verifier" if verifier.holding is Holding.PACKED else "draft"
        reason = f"the {which}'s layer is quantized or has no plain weight"
        yield Site(place, verifier.slot, draft.slot, owns, Obstacle(Cause.NOT_PLAIN, reason))
    else:
        weights = Site(place, verifier.tensor_slot("weight"), draft.tensor_slot("weight"), owns)
        yield weights
        biases = replace(
            weights, verifier=verifier.tensor_slot("bias"), draft=draft.tensor_slot("bias")
        )
        yield from _bias_site(biases)


def _bias_site(site: Site) -> Iterator[Site]:
    """Return the site of two biases; one without the other is told, since outputs will differ."""
    in_verifier = site.verifier is not None and site.verifier.tensor is not None
    in_draft = site.draft is not None and site.draft.tensor is not None
    if in_verifier and in_draft:
        yield site
    elif in_verifier:
        reason = "the draft's layer adds no bias"
        yield replace(site, draft=None, obstacle=Obstacle(Cause.NOT_IN_DRAFT, reason))
    elif in_draft:
        reason = "the verifier's layer adds no bias"
        yield replace(site, verifier=None, obstacle=Obstacle(Cause.NOT_IN_VERIFIER, reason))
