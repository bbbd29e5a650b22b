"""Equal parameters outside the usual places, for callers who want all of them shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

import torch
from torch import nn

from weightsync.loader.compare import is_constant, is_plain, same_bytes, sample, view_key
from weightsync.loader.decide import Candidate, Decision, share
from weightsync.loader.draft import Draft
from weightsync.loader.places import Place
from weightsync.loader.report import Verdict
from weightsync.loader.sites import Site
from weightsync.loader.slots import Slot, Slots


def equal_pairs(verifier: Slots, draft: Draft, sites: list[Site]) -> Iterator[Decision]:
    """Decide about each parameter of the draft that is at no site and equals one of the verifier.

    The verifier's parameter of the same name comes first. One without that name must hold more than
    a single value: two norms full of ones are equal by chance, and drift apart with the next
    update. Buffers are state that a forward pass may write, and are left alone.
    """
    by_sample: dict[Hashable, list[tuple[Slot, torch.Tensor]]] = defaultdict(list)
    for slot, tensor in _parameters(verifier):
        by_sample[_sample_key(tensor)].append((slot, tensor))
    seen = _views_at(sites, draft)
    for slot, tensor in _parameters(draft.slots):
        if view_key(tensor) in seen or draft.is_placeholder(slot):
            continue
        seen.add(view_key(tensor))
        holders = draft.holders(slot)
        names = {holder.name for holder in holders}
        similar = by_sample.get(_sample_key(tensor), [])
        for source_slot, source in sorted(similar, key=lambda item: item[0].name not in names):
            if draft.excludes({source_slot.name, *names}) or not same_bytes(tensor, source):
                continue
            if source_slot.name not in names and is_constant(tensor):
                break
            site = Site(Place.OTHER, source_slot, slot)
            candidate = Candidate(site, slot, source_slot, source)
            yield share(candidate, holders, Verdict.DISCOVERED, "bit-identical", draft)
            break


def _parameters(slots: Slots) -> Iterator[tuple[Slot, nn.Parameter]]:
    for slot, tensor in slots.items():
        if isinstance(tensor, nn.Parameter) and tensor.numel() > 0 and is_plain(tensor):
            yield slot, tensor


def _sample_key(tensor: torch.Tensor) -> Hashable:
    bits = () if tensor.is_meta else sample(tensor)
    return tuple(tensor.shape), tensor.dtype, tensor.device, bits


def _views_at(sites: list[Site], draft: Draft) -> set[Hashable]:
    """Return the draft's tensors at sites; a packed layer stands for all that it holds."""
    names = {site.draft.name for site in sites if site.draft is not None}
    return {
        view_key(tensor)
        for slot, tensor in draft.slots.items()
        if slot.name in names or slot.name.rpartition(".")[0] in names
    }
