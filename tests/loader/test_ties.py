"""Ties inside the draft, and whether what was shared stays one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.loader.models import Tiny, bits, flip_one_bit, pair_at, snapshot, twin, write
from weightsync.core.errors import SharedWeightError
from weightsync.loader import (
    Cause,
    Place,
    Verdict,
    check_ties,
    lost_ties,
    share_identical_weights,
)


def tied(model: Tiny) -> Tiny:
    """Tie the head of a model to its embedding."""
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize("how", ["object", "storage"])
def test_an_inner_tie_follows(how: str) -> None:
    """B14, B21: the draft's tied head follows its embedding, however the tie was made."""
    verifier = Tiny()
    draft = tied(twin(verifier))
    if how == "storage":
        draft.head.weight = nn.Parameter(draft.embed.weight.detach())
    report = share_identical_weights(verifier, draft)
    embedding = pair_at(report, Place.INPUT_EMBEDDING)
    assert embedding.draft == ("embed.weight", "head.weight")
    assert embedding.bytes_saved == embedding.num_bytes
    assert pair_at(report, Place.OUTPUT_HEAD).cause is Cause.INNER_TIE
    assert draft.head.weight is draft.embed.weight is verifier.embed.weight
    write(verifier.embed.weight, 0.25)
    assert bits(draft.head.weight) == bits(verifier.embed.weight)
    check_ties(report, verifier, draft)


def test_both_tied() -> None:
    """Two tied models of equal values end with one tensor in four places, told once."""
    verifier = tied(Tiny())
    draft = twin(verifier)
    report = share_identical_weights(verifier, draft)
    (pair,) = report.pairs
    assert pair.draft == ("embed.weight", "head.weight")
    assert report.shared_bytes == report.bytes_saved == pair.num_bytes
    assert draft.head.weight is verifier.embed.weight


def test_a_tied_draft_that_equals_the_head_only() -> None:
    """A tied draft may equal the verifier's head and not its embedding; its tie stays."""
    verifier = Tiny()
    draft = tied(twin(verifier))
    write(draft.embed.weight, 1.0)
    write(verifier.head.weight, 1.0)
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.OUTPUT_HEAD).verdict is Verdict.DISCOVERED
    assert pair_at(report, Place.INPUT_EMBEDDING).cause is Cause.INNER_TIE
    assert draft.embed.weight is draft.head.weight is verifier.head.weight


def test_tied_placeholders_go_to_their_own_counterparts() -> None:
    """A draft that has neither embedding nor head gets the verifier's two, tied or not."""
    verifier, draft = Tiny(), tied(Tiny(seed=1))
    names = ["embed.weight", "head.weight"]
    report = share_identical_weights(verifier, draft, missing=names)
    assert [pair.verdict for pair in report.pairs] == [Verdict.DECLARED] * 2
    assert report.bytes_saved == report.pairs[0].num_bytes  # one placeholder under two names
    assert draft.embed.weight is verifier.embed.weight
    assert draft.head.weight is verifier.head.weight


def test_a_tied_tensor_is_missing_only_under_all_its_names() -> None:
    """B19: a head left out of the checkpoint has the values of the embedding it is tied to."""
    verifier, draft = Tiny(), tied(Tiny(seed=1))
    before = snapshot(draft)
    report = share_identical_weights(verifier, draft, missing=["head.weight"])
    assert report.shared == ()
    assert snapshot(draft) == before


def test_a_declared_embedding_takes_its_tied_head_along() -> None:
    """B06, B14: what is tied to a copy that means nothing must not stay behind."""
    verifier, draft = Tiny(), tied(Tiny(seed=1))
    draft.has_own_embed_tokens = False
    share_identical_weights(verifier, draft)
    assert draft.head.weight is draft.embed.weight is verifier.embed.weight


def test_contradicting_flags_keep_the_drafts_own() -> None:
    """B07: an own head is not given up because the embedding tied to it is declared absent."""
    verifier, draft = Tiny(), tied(Tiny(seed=1))
    draft.has_own_embed_tokens = False
    draft.has_own_lm_head = True
    before = snapshot(draft)
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INPUT_EMBEDDING).cause is Cause.INNER_TIE
    assert pair_at(report, Place.OUTPUT_HEAD).verdict is Verdict.DISTINCT
    assert snapshot(draft) == before


@pytest.mark.parametrize("declared", [False, True])
def test_an_alias_of_another_width_is_never_written(declared: bool) -> None:
    """B06: a tied draft of its own width leaves the verifier's table, and its own tie, alone."""
    verifier, draft = Tiny(), tied(Tiny(width=3))
    if declared:
        draft.has_own_embed_tokens = draft.has_own_lm_head = False
    before = snapshot(verifier)
    report = share_identical_weights(verifier, draft)
    assert {pair.cause for pair in report.pairs} == {Cause.SHAPE}
    assert draft.head.weight is draft.embed.weight
    assert snapshot(verifier) == before


def test_excluding_one_name_of_a_tie_excludes_the_tensor() -> None:
    """B09: a tied tensor is one tensor, so it is shared under all its names or under none."""
    verifier = Tiny()
    draft = tied(twin(verifier))
    report = share_identical_weights(verifier, draft, exclude=["head.weight"])
    assert {pair.cause for pair in report.pairs} == {Cause.EXCLUDED}
    assert draft.head.weight is draft.embed.weight


def test_a_module_under_two_names_is_told_under_both() -> None:
    """B38: one tensor seen through two modules is one pair, counted once."""
    verifier = Tiny()
    draft = twin(verifier)
    draft.lookup = draft.embed
    report = share_identical_weights(verifier, draft)
    embedding = pair_at(report, Place.INPUT_EMBEDDING)
    assert embedding.draft == ("embed.weight", "lookup.weight")
    assert embedding.bytes_saved == embedding.num_bytes


@pytest.mark.parametrize("registered", [True, False])
def test_a_plain_view_of_a_shared_weight_follows(registered: bool) -> None:
    """B14: a buffer or an attribute over the old weight sees the new one, and stays what it was."""
    verifier = Tiny()
    draft = twin(verifier)
    if registered:
        draft.register_buffer("table", draft.embed.weight.detach())
    else:
        setattr(draft, "table", draft.embed.weight.detach())  # noqa: B010 - mypy knows no such
    names = list(draft.state_dict())
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INPUT_EMBEDDING).bytes_saved == 512
    assert list(draft.state_dict()) == names
    write(verifier.embed.weight, 0.5)
    assert bits(draft.get_buffer("table") if registered else vars(draft)["table"]) == bits(
        verifier.embed.weight
    )
    check_ties(report, verifier, draft)


def replace_parameter(model: Tiny) -> None:
    """Put a new parameter in, as a careless loader does."""
    model.embed.weight = nn.Parameter(model.embed.weight.detach().clone())


def assign(model: Tiny) -> None:
    """Load by assignment instead of by copy."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def second_object(model: Tiny) -> None:
    """Put another parameter over the same storage."""
    model.embed.weight = nn.Parameter(model.embed.weight.detach())


def remove(model: Tiny) -> None:
    """Take the embedding away."""
    del model.embed


CUTS: list[Callable[[Tiny], Any]] = [replace_parameter, assign, second_object, remove]


@pytest.mark.parametrize("side", ["verifier", "draft"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_lost_tie_is_named(cut: Callable[[Tiny], Any], side: str) -> None:
    """B21: whatever cuts a tie, on either side, the check says which and how."""
    verifier = Tiny()
    draft = twin(verifier)
    report = share_identical_weights(verifier, draft)
    assert lost_ties(report, verifier, draft) == ()
    cut(verifier if side == "verifier" else draft)
    lost = lost_ties(report, verifier, draft)
    assert ("embed.weight", "embed.weight") in {(tie.verifier, tie.draft) for tie in lost}
    with pytest.raises(SharedWeightError, match=r"draft embed\.weight / verifier embed\.weight"):
        check_ties(report, verifier, draft)


def test_writes_in_place_keep_the_tie() -> None:
    """Loading by copy, a new `.data` and a change of dtype leave one object in both models."""
    verifier = Tiny()
    draft = twin(verifier)
    report = share_identical_weights(verifier, draft)
    verifier.load_state_dict(Tiny(seed=2).state_dict())
    check_ties(report, verifier, draft)
    verifier.embed.weight.data = torch.rand_like(verifier.embed.weight)
    check_ties(report, verifier, draft)
    verifier.to(torch.bfloat16)
    check_ties(report, verifier, draft)
    assert bits(draft.embed.weight) == bits(verifier.embed.weight)


def test_a_view_loses_its_tie_with_new_data() -> None:
    """Two objects over one storage part at the next `.data =`, and the check sees it."""
    verifier = Tiny()
    draft = twin(verifier)
    report = share_identical_weights(verifier, draft, prefer_view=True)
    verifier.embed.weight.data = verifier.embed.weight.data.clone()
    (lost,) = lost_ties(report, verifier, draft)
    assert (lost.draft, lost.reason) == ("embed.weight", "two storages")


def test_the_report_for_programs_and_people() -> None:
    """The report is JSON values and a table that names each pair, its verdict and the totals."""
    verifier = Tiny()
    draft = twin(verifier)
    flip_one_bit(draft.head.weight)
    report = share_identical_weights(verifier, draft)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["bytes_saved"] == values["shared_bytes"] == 512
    assert values["pairs"][1] == {
        "place": "output_head",
        "verifier": "head.weight",
        "draft": ["head.weight"],
        "verdict": "distinct",
        "reason": "at least one bit differs",
        "cause": None,
        "tie": None,
        "num_bytes": 512,
        "bytes_saved": 0,
    }
    header, _, embedding, head, total = str(report).splitlines()
    assert header.split() == ["place", "verifier", "draft", "verdict", "size", "saved", "reason"]
    assert "discovered" in embedding
    assert "512 B" in embedding
    assert "distinct" in head
    assert total == "1 of 2 pairs shared: 512 B held together, 512 B freed"
