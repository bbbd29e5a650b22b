"""Decisions: which slots of the draft shall hold which tensor of the verifier."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weightsync.loader.compare import same_bytes, view_key
from weightsync.loader.draft import Draft
from weightsync.loader.report import Cause, Pair, Verdict
from weightsync.loader.sites import NOT_IN_VERIFIER, Obstacle, Site
from weightsync.loader.slots import Slot


@dataclass(frozen=True, slots=True)
class Decision:
    """A pair, and what makes it true.

    Attributes:
        pair: What will be reported.
        slots: Slots of the draft that shall hold the source; empty if nothing is shared.
        source: The verifier's tensor, or its module for an empty slot.
    """

    pair: Pair
    slots: tuple[Slot, ...] = ()
    source: torch.Tensor | nn.Module | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A site without obstacles: the draft's slot, and the verifier's slot and tensor."""

    site: Site
    draft: Slot
    verifier: Slot
    source: torch.Tensor

    @property
    def key(self) -> Hashable:
        """What is equal for two candidates that offer the same tensor of the verifier."""
        return view_key(self.source)


def decide(sites: Iterable[Site], draft: Draft) -> Iterator[Decision]:
    """Decide about all sites, those of one and the same tensor of the draft together."""
    groups: dict[Hashable, list[Site]] = {}
    for site in sites:
        tensor = None if site.draft is None else site.draft.tensor
        groups.setdefault(id(site) if tensor is None else view_key(tensor), []).append(site)
    for group in groups.values():
        yield from _decide_group(group, draft)


def share(
    candidate: Candidate, holders: Sequence[Slot], verdict: Verdict, reason: str, draft: Draft
) -> Decision:
    """Decide that all holders of a tensor of the draft shall hold the candidate's source."""
    source, tensor = candidate.source, candidate.draft.tensor
    if tensor is not None and view_key(tensor) == candidate.key:
        verdict, reason = Verdict.ALREADY, "one storage before"
    pair = Pair(
        candidate.site.place,
        candidate.verifier.name,
        tuple(slot.name for slot in holders),
        verdict,
        reason,
        tie=draft.tie(tensor, source),
        num_bytes=source.numel() * source.itemsize,
    )
    return Decision(pair, tuple(holders), candidate.site.module or source)


def _decide_group(sites: list[Site], draft: Draft) -> Iterator[Decision]:
    slot = sites[0].draft
    tensor = None if slot is None else slot.tensor
    holders = () if slot is None else draft.holders(slot)
    placeholder = draft.is_placeholder(slot)
    checked = [(site, _check(site, tensor, holders, draft)) for site in sites]
    free = [found for _, found in checked if isinstance(found, Candidate)]

    flags = {site.owns for site in sites}
    chosen: list[Candidate] = []
    verdict, reason = Verdict.DECLARED, "the draft declares no copy of its own"
    if draft.borrows(slot):
        chosen, reason = free, "the draft has no copy of its own"
    elif flags >= {False} and True not in flags:
        chosen = [candidate for candidate in free if candidate.site.owns is False]
    if not chosen and tensor is not None and not placeholder:
        verdict, reason = Verdict.DISCOVERED, "bit-identical"
        chosen = [candidate for candidate in free if same_bytes(tensor, candidate.source)][:1]

    # Each slot goes to its own counterpart, and what is merely tied to it follows the first one.
    followers: dict[Hashable, list[Slot]] = {candidate.key: [] for candidate in chosen}
    for holder in holders if chosen else ():
        own = (candidate for candidate in chosen if candidate.draft.key == holder.key)
        followers[next(own, chosen[0]).key].append(holder)

    for site, found in checked:
        if not isinstance(found, Candidate) or found.key not in followers:
            yield Decision(_not_shared(site, found, chosen, holders))
        elif followers[found.key]:
            yield share(found, followers[found.key], verdict, reason, draft)
            followers[found.key] = []  # told once


def _check(
    site: Site, tensor: torch.Tensor | None, holders: Sequence[Slot], draft: Draft
) -> Candidate | Obstacle:
    """Return the candidate, or what stands against it before any value is looked at."""
    source = None if site.verifier is None else site.verifier.tensor
    if site.obstacle is not None:
        return site.obstacle
    if site.draft is None or site.verifier is None or source is None:
        return NOT_IN_VERIFIER
    if draft.excludes([site.verifier.name, *(slot.name for slot in holders)]):
        return Obstacle(Cause.EXCLUDED, "switched off by the caller")
    borrows = draft.borrows(site.draft)
    return _difference(source, tensor, borrows=borrows) or Candidate(
        site, site.draft, site.verifier, source
    )


def _difference(
    source: torch.Tensor, tensor: torch.Tensor | None, *, borrows: bool
) -> Obstacle | None:
    """Return what makes two tensors unlike, values aside; an empty slot takes any tensor."""
    if tensor is None:
        return None
    absent = borrows and tensor.is_meta
    for cause, verifier, draft in (
        (Cause.SHAPE, tuple(source.shape), tuple(tensor.shape)),
        (Cause.DTYPE, source.dtype, tensor.dtype),
        (Cause.DEVICE, source.device, source.device if absent else tensor.device),
    ):
        if verifier != draft:
            reason = f"{cause.value} differs: verifier {verifier}, draft {draft}"
            return Obstacle(cause, reason.replace("torch.", ""))
    return None


def _not_shared(
    site: Site, found: Candidate | Obstacle, chosen: Sequence[Candidate], holders: Sequence[Slot]
) -> Pair:
    """Return the pair of a site that does not become one."""
    names: tuple[str, ...] = ()
    num_bytes = 0
    if site.draft is not None:
        own = tuple(slot.name for slot in holders if slot.key == site.draft.key)
        names = own or (site.draft.name,)
        if (tensor := site.draft.tensor) is not None:
            num_bytes = tensor.numel() * tensor.itemsize
    verdict, cause = Verdict.NOT_SHARED, None
    if chosen:
        cause = Cause.INNER_TIE
        reason = f"the draft ties it to {chosen[0].draft.name}, now the verifier's"
    elif isinstance(found, Obstacle):
        cause, reason = found.cause, found.reason
    elif site.owns is False:
        cause = Cause.INNER_TIE
        reason = "the draft ties it to a copy that it declares its own"
    else:
        verdict, reason = Verdict.DISTINCT, "at least one bit differs"
    verifier = None if site.verifier is None else site.verifier.name
    return Pair(site.place, verifier, names, verdict, reason, cause, num_bytes=num_bytes)
