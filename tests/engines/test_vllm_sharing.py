"""What ranks of a vLLM share, decided together; it needs no vLLM to be decided."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.loader.models import flip_one_bit, twin
from tests.loader.second_runner import Causal, verifier
from weightsync.core.errors import SharedWeightError
from weightsync.engines.vllm.sharing import Sharing, find_sharing
from weightsync.loader import Cause, Verdict

TIMEOUT = timedelta(seconds=60)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def find_on_ranks(*pairs: tuple[Causal, Causal], widen: bool = True) -> list[Sharing]:
    """Return what each rank finds about its own pair of models."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def find(rank: int) -> Sharing:
        # Ranks are threads here, so that none of them can have a default group.
        group: Any = dist.ProcessGroupGloo(store, rank, len(pairs), TIMEOUT)
        return find_sharing(*pairs[rank], widen=widen, group=group)

    with ThreadPoolExecutor(len(pairs)) as pool:
        return list(pool.map(find, range(len(pairs))))


def pair_of(seed: int) -> tuple[Causal, Causal]:
    """Return a rank's part of a verifier, and of a draft that equals it."""
    target = verifier(seed=seed)
    return target, twin(target)


def test_ranks_share_the_same_names() -> None:
    """Where one rank's part differs no rank shares, and each one knows."""
    ranks = [pair_of(0), pair_of(1)]
    flip_one_bit(ranks[1][1].lm_head.weight)
    for (target, draft), sharing in zip(ranks, find_on_ranks(*ranks), strict=True):
        embedding, head = sharing.report.pairs
        assert embedding.verdict is Verdict.DISCOVERED
        assert (head.verdict, head.cause) == (Verdict.NOT_SHARED, Cause.EXCLUDED)
        assert draft.model.embed_tokens.weight is target.model.embed_tokens.weight
        assert draft.lm_head.weight is not target.lm_head.weight
        sharing.check()


def test_what_differs_everywhere_is_distinct() -> None:
    """Ranks that agree on a difference tell it as one."""
    ranks = [pair_of(0), pair_of(1)]
    for _, draft in ranks:
        flip_one_bit(draft.lm_head.weight)
    found = find_on_ranks(*ranks)
    assert [sharing.report.pairs[1].verdict for sharing in found] == [Verdict.DISTINCT] * 2


def test_without_widening_nothing_changes() -> None:
    """What vLLM has made one is told and watched, what is merely equal stays apart."""
    target, draft = pair_of(0)
    draft.lm_head = target.lm_head
    (sharing,) = find_on_ranks((target, draft), widen=False)
    embedding, head = sharing.facts()
    assert (embedding["verdict"], embedding["shared_by"]) == ("not shared", None)
    assert (head["verdict"], head["shared_by"]) == ("already", "vllm")
    assert draft.model.embed_tokens.weight is not target.model.embed_tokens.weight
    draft.lm_head = twin(target.lm_head)
    with pytest.raises(SharedWeightError, match="two storages"):
        sharing.check()


def test_what_was_cut_is_not_watched() -> None:
    """Names that were cut off are neither checked nor told any more."""
    target, draft = pair_of(0)
    (sharing,) = find_on_ranks((target, draft))
    draft.lm_head = twin(target.lm_head)
    left = sharing.without([HEAD])
    left.check()
    assert [pair.draft for pair in left.report.pairs] == [(EMBEDDING,)]
    assert [facts["shared_by"] for facts in left.facts()] == ["weightsync"]
