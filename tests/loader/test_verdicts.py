"""Which pairs are shared, on plain modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.loader.models import (
    VOCABULARY,
    WIDTH,
    Packed,
    Tiny,
    bits,
    flip_one_bit,
    other_dtype,
    other_width,
    pair_at,
    snapshot,
    twin,
    unlike_embeddings,
    write,
)
from weightsync.core.errors import IncompleteError, InvalidRequestError, UnknownTensorError
from weightsync.loader import (
    Cause,
    Place,
    Tie,
    Verdict,
    check_ties,
    share_identical_weights,
)


def test_identical_copies_become_one_object() -> None:
    """A bit-identical copy is replaced by the verifier's parameter, and its memory is freed."""
    verifier = Tiny()
    draft = twin(verifier)
    old = weakref.ref(draft.embed.weight.untyped_storage())
    old_parameter = weakref.ref(draft.embed.weight)
    report = share_identical_weights(verifier, draft)
    pair = pair_at(report, Place.INPUT_EMBEDDING)
    assert (pair.verdict, pair.tie) == (Verdict.DISCOVERED, Tie.OBJECT)
    assert (pair.verifier, pair.draft) == ("embed.weight", ("embed.weight",))
    assert pair.num_bytes == pair.bytes_saved == VOCABULARY * WIDTH * 4
    assert draft.embed.weight is verifier.embed.weight
    assert draft.head.weight is verifier.head.weight
    assert draft.fc.weight is not verifier.fc.weight
    assert old_parameter() is None
    assert old() is None
    check_ties(report, verifier, draft)


def test_an_update_of_the_verifier_reaches_the_draft_and_nothing_else() -> None:
    """Writing into the shared embedding changes what the draft computes, and no other tensor."""
    verifier, draft = Tiny(), Tiny(seed=1)
    draft.embed = twin(verifier.embed)
    share_identical_weights(verifier, draft)
    before, logits = snapshot(draft), draft(torch.arange(4))
    write(verifier.embed.weight, 0.5)
    after = snapshot(draft)
    assert {name for name in before if before[name] != after[name]} == {"embed.weight"}
    assert not torch.equal(logits, draft(torch.arange(4)))


@pytest.mark.parametrize("place", ["embed", "head"])
def test_one_bit_keeps_both(place: str) -> None:
    """B07: one different bit keeps the draft's own copy, whatever happens to the verifier."""
    verifier = Tiny()
    draft = twin(verifier)
    flip_one_bit(getattr(draft, place).weight)
    before = bits(getattr(draft, place).weight)
    report = share_identical_weights(verifier, draft)
    (pair,) = (pair for pair in report.pairs if pair.draft == (f"{place}.weight",))
    assert (pair.verdict, pair.tie, pair.bytes_saved) == (Verdict.DISTINCT, None, 0)
    write(getattr(verifier, place).weight, 3.0)
    assert bits(getattr(draft, place).weight) == before


def test_nan_is_shared_and_negative_zero_is_not() -> None:
    """B46: equal NaNs do not hinder sharing; -0.0 beside 0.0 does."""
    verifier = Tiny()
    write(verifier.embed.weight[3], float("nan"))
    write(verifier.head.weight[3], 0.0)
    draft = twin(verifier)
    write(draft.head.weight[3], -0.0)
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INPUT_EMBEDDING).verdict is Verdict.DISCOVERED
    assert pair_at(report, Place.OUTPUT_HEAD).verdict is Verdict.DISTINCT


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(("change", "cause"), unlike_embeddings())
def test_unlike_copies_in_the_draft(
    change: Callable[[Tiny], None], cause: Cause, declared: bool
) -> None:
    """B08, B10, B12: what can't be one is left as it is, with the cause, even if declared."""
    verifier = Tiny()
    draft = twin(verifier)
    change(draft)
    if declared:
        draft.has_own_embed_tokens = False
    before = snapshot(draft)
    report = share_identical_weights(verifier, draft)
    pair = pair_at(report, Place.INPUT_EMBEDDING)
    assert (pair.verdict, pair.cause) == (Verdict.NOT_SHARED, cause)
    assert pair.reason
    assert snapshot(draft) == before
    assert pair_at(report, Place.OUTPUT_HEAD).verdict is Verdict.DISCOVERED


@pytest.mark.parametrize("place", [Place.INPUT_EMBEDDING, Place.OUTPUT_HEAD])
@pytest.mark.parametrize("kind", [nn.Identity, Packed])
def test_a_verifier_without_a_plain_weight(kind: type[nn.Module], place: Place) -> None:
    """B10: a stage that owns no embedding or head, or a quantized one, lends nothing."""
    verifier = Tiny()
    draft = twin(verifier)
    attribute = "embed" if place is Place.INPUT_EMBEDDING else "head"
    setattr(verifier, attribute, kind())
    report = share_identical_weights(verifier, draft)
    cause = Cause.NOT_IN_VERIFIER if kind is nn.Identity else Cause.NOT_PLAIN
    pair = pair_at(report, place)
    assert (pair.verdict, pair.cause) == (Verdict.NOT_SHARED, cause)
    assert len(report.shared) == 1


def test_a_flag_declares_without_a_comparison() -> None:
    """A draft that says it has no copy of its own gets the verifier's, whatever its values."""
    verifier, draft = Tiny(), Tiny(seed=1)
    draft.has_own_embed_tokens = False
    draft.has_own_lm_head = True
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INPUT_EMBEDDING).verdict is Verdict.DECLARED
    assert pair_at(report, Place.OUTPUT_HEAD).verdict is Verdict.DISTINCT
    assert draft.embed.weight is verifier.embed.weight


def test_no_flag_is_no_declaration() -> None:
    """B07: without a flag a copy that is there and differs is never overwritten."""
    verifier, draft = Tiny(), Tiny(seed=1)
    report = share_identical_weights(verifier, draft)
    assert [pair.verdict for pair in report.pairs] == [Verdict.DISTINCT] * 2


def test_an_own_copy_that_equals_is_shared() -> None:
    """The flag of an own copy asks for a comparison, it does not forbid sharing."""
    verifier = Tiny()
    draft = twin(verifier)
    draft.has_own_embed_tokens = draft.has_own_lm_head = True
    assert len(share_identical_weights(verifier, draft).shared) == 2


@pytest.mark.parametrize("flag", [None, False, True])
@pytest.mark.parametrize("how", ["module", "weight", "meta", "missing"])
def test_a_copy_that_is_not_there(how: str, flag: bool | None) -> None:
    """A draft without content for its head holds the verifier's, even if a flag claims a copy."""
    verifier, draft = Tiny(), Tiny(seed=1)
    if flag is not None:
        draft.has_own_lm_head = flag
    missing = ["head.weight"] if how == "missing" else []
    if how == "module":
        draft.head = None  # type: ignore[assignment]
    elif how == "weight":
        draft.head.register_parameter("weight", None)
    elif how == "meta":
        draft.head.to("meta")
    report = share_identical_weights(verifier, draft, missing=missing)
    pair = pair_at(report, Place.OUTPUT_HEAD)
    assert (pair.verdict, pair.draft) == (Verdict.DECLARED, ("head.weight",))
    assert draft.head.weight is verifier.head.weight
    assert pair.bytes_saved == (VOCABULARY * WIDTH * 4 if how == "missing" else 0)
    check_ties(report, verifier, draft)
    assert draft(torch.arange(3)).shape == (3, VOCABULARY)


def test_an_empty_place_takes_a_quantized_module_whole() -> None:
    """A draft that expects the verifier's module gets it with all that it holds."""
    verifier, draft = Tiny(), Tiny(seed=1)
    verifier.head = Packed()  # type: ignore[assignment]
    draft.head = None  # type: ignore[assignment]
    report = share_identical_weights(verifier, draft)
    assert draft.head is verifier.head
    assert {pair.draft for pair in report.shared} == {
        ("head.weight_packed",),
        ("head.weight_scale",),
    }
    check_ties(report, verifier, draft)


@pytest.mark.parametrize("change", [other_width, other_dtype])
@pytest.mark.parametrize("how", ["meta", "missing"])
def test_a_draft_left_without_content_is_an_error(how: str, change: Callable[[Tiny], None]) -> None:
    """B11, B13: random or absent values that nobody can replace are told, and nothing changes."""
    verifier = Tiny()
    draft = twin(verifier)
    change(draft)
    if how == "meta":
        draft.embed.to("meta")
    head = draft.head.weight
    with pytest.raises(IncompleteError, match=r"embed\.weight") as caught:
        share_identical_weights(
            verifier, draft, missing=["embed.weight"] if how == "missing" else []
        )
    assert caught.value.subjects == ("embed.weight",)
    assert draft.head.weight is head


def test_a_missing_layer_is_an_error() -> None:
    """B13: a layer that the verifier can't lend must be in the draft's checkpoint."""
    verifier = Tiny()
    with pytest.raises(IncompleteError, match=r"fc\.bias"):
        share_identical_weights(verifier, twin(verifier), missing=["fc.bias"])


def test_a_verifier_that_is_not_loaded_is_an_error() -> None:
    """B08: nothing is compared before the verifier is complete."""
    verifier = Tiny()
    draft = twin(verifier)
    verifier.fc.to("meta")
    with pytest.raises(IncompleteError, match=r"2 tensors of the verifier.*fc\.weight"):
        share_identical_weights(verifier, draft)


def test_an_unknown_missing_name_is_an_error() -> None:
    """A misspelt name would leave random values in the draft."""
    with pytest.raises(UnknownTensorError, match="lm_haed"):
        share_identical_weights(Tiny(), Tiny(), missing=["lm_haed.weight"])


def test_what_is_no_module_is_an_error() -> None:
    """A callable that wraps no module is refused by name."""
    with pytest.raises(InvalidRequestError, match="builtin_function_or_method is no torch module"):
        share_identical_weights(print, Tiny())


@pytest.mark.parametrize("name", ["head.weight", "*.weight", "head.*"])
def test_the_caller_excludes_names(name: str) -> None:
    """B09: sharing can be switched off for a name on all ranks alike."""
    verifier = Tiny()
    draft = twin(verifier)
    report = share_identical_weights(verifier, draft, exclude=[name])
    pair = pair_at(report, Place.OUTPUT_HEAD)
    assert (pair.verdict, pair.cause) == (Verdict.NOT_SHARED, Cause.EXCLUDED)
    assert draft.head.weight is not verifier.head.weight


def test_the_verdict_is_each_ranks_own() -> None:
    """B09: two ranks with different shards can read each other's verdicts from the reports."""
    reports = []
    for rank in range(2):
        verifier = Tiny(seed=rank)
        draft = twin(verifier)
        if rank == 1:
            flip_one_bit(draft.embed.weight)
        reports.append(share_identical_weights(verifier, draft).to_dict())
    verdicts = [report["pairs"][0]["verdict"] for report in reports]
    assert verdicts == ["discovered", "distinct"]


def test_only_the_places_asked_for() -> None:
    """Places that the caller does not name are not looked at."""
    verifier = Tiny()
    report = share_identical_weights(verifier, twin(verifier), places={Place.OUTPUT_HEAD})
    assert [pair.place for pair in report.pairs] == [Place.OUTPUT_HEAD]


def test_sharing_twice_changes_nothing() -> None:
    """What is one already stays one and saves nothing more."""
    verifier = Tiny()
    draft = twin(verifier)
    share_identical_weights(verifier, draft)
    report = share_identical_weights(verifier, draft)
    assert [pair.verdict for pair in report.pairs] == [Verdict.ALREADY] * 2
    assert report.bytes_saved == 0
    check_ties(report, verifier, draft)


def test_two_parameters_over_one_storage_become_one_object() -> None:
    """B21: a tie that the next `.data =` would cut is made a lasting one."""
    verifier, draft = Tiny(), Tiny(seed=1)
    draft.embed.weight = nn.Parameter(verifier.embed.weight.detach())
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INPUT_EMBEDDING).verdict is Verdict.ALREADY
    assert draft.embed.weight is verifier.embed.weight


def test_a_view_keeps_the_drafts_objects() -> None:
    """Where an engine needs the draft's own parameters they get the verifier's storage."""
    verifier = Tiny()
    draft = twin(verifier)
    parameter = draft.embed.weight
    old = weakref.ref(parameter.untyped_storage())
    report = share_identical_weights(verifier, draft, prefer_view=True)
    pair = pair_at(report, Place.INPUT_EMBEDDING)
    assert (pair.tie, pair.bytes_saved) == (Tie.VIEW, VOCABULARY * WIDTH * 4)
    assert draft.embed.weight is parameter
    assert parameter is not verifier.embed.weight
    assert old() is None
    write(verifier.embed.weight, 2.0)
    assert bits(parameter) == bits(verifier.embed.weight)
    check_ties(report, verifier, draft)


def test_a_view_of_nothing_is_the_object() -> None:
    """A parameter on the meta device can't be kept, so the verifier's takes its place."""
    verifier, draft = Tiny(), Tiny(seed=1)
    draft.head.to("meta")
    report = share_identical_weights(verifier, draft, prefer_view=True)
    assert pair_at(report, Place.OUTPUT_HEAD).tie is Tie.OBJECT
    assert draft.head.weight is verifier.head.weight


def test_models_made_in_inference_mode() -> None:
    """B71: parameters made in inference mode are shared like others."""
    with torch.inference_mode():
        verifier = Tiny()
        draft = twin(verifier)
    report = share_identical_weights(verifier, draft)
    assert len(report.shared) == 2


@pytest.mark.parametrize("bias", ["both equal", "both, unlike", "verifier", "draft"])
def test_the_bias_of_the_head(bias: str) -> None:
    """Equal biases are shared too; one that only one side adds is told and left alone."""
    verifier = Tiny()
    verifier.head.bias = nn.Parameter(torch.rand(VOCABULARY))
    draft = twin(verifier)
    if bias == "both, unlike":
        flip_one_bit(draft.head.bias)
    elif bias == "verifier":
        draft.head.bias = None
    elif bias == "draft":
        verifier.head.bias = None  # type: ignore[assignment]
    report = share_identical_weights(verifier, draft)
    weight, second = (pair for pair in report.pairs if pair.place is Place.OUTPUT_HEAD)
    assert weight.verdict is Verdict.DISCOVERED
    expected = {
        "both equal": (Verdict.DISCOVERED, None),
        "both, unlike": (Verdict.DISTINCT, None),
        "verifier": (Verdict.NOT_SHARED, Cause.NOT_IN_DRAFT),
        "draft": (Verdict.NOT_SHARED, Cause.NOT_IN_VERIFIER),
    }[bias]
    assert (second.verdict, second.cause) == expected


def test_bytes_saved_are_those_really_freed() -> None:
    """A copy that is a slice of a storage still in use frees nothing, and is not counted."""
    verifier = Tiny()
    draft = twin(verifier)
    flat = torch.cat([draft.embed.weight.detach().view(-1), draft.fc.weight.detach().view(-1)])
    size = VOCABULARY * WIDTH
    draft.embed.weight = nn.Parameter(flat[:size].view(VOCABULARY, WIDTH))
    draft.fc.weight = nn.Parameter(flat[size:].view(WIDTH, WIDTH))
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INPUT_EMBEDDING).verdict is Verdict.DISCOVERED
    assert pair_at(report, Place.INPUT_EMBEDDING).bytes_saved == 0


def test_all_equal_parameters() -> None:
    """On request any equal parameter is shared: same name first, but no constants by chance."""
    verifier = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 4))
    draft = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Identity(), nn.Identity())
    draft.extra = nn.LayerNorm(4)
    draft[0].load_state_dict(verifier[3].state_dict())
    assert share_identical_weights(verifier, draft).pairs == ()
    report = share_identical_weights(verifier, draft, all_equal=True)
    assert {(pair.verifier, pair.draft) for pair in report.shared} == {
        ("3.weight", ("0.weight",)),
        ("3.bias", ("0.bias",)),
        ("1.weight", ("1.weight",)),
        ("1.bias", ("1.bias",)),
    }
    assert draft[0].weight is verifier[3].weight
    check_ties(report, verifier, draft)
