"""The rules of sharing on modules in the shape of vLLM's second model runner, which needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.loader.models import bits, pair_at, snapshot, twin
from tests.loader.second_runner import (
    INDEX_BUFFER,
    Causal,
    Conditional,
    GraphWrapper,
    Missing,
    WithLora,
    embedding_of,
    layer_heads,
    mtp,
    verifier,
)
from weightsync.core.errors import IncompleteError
from weightsync.loader import Cause, Place, Verdict, check_ties, share_identical_weights

PLACES = [
    (Place.INPUT_EMBEDDING, "has_own_embed_tokens"),
    (Place.OUTPUT_HEAD, "has_own_lm_head"),
]


@pytest.mark.parametrize(("place", "flag"), PLACES)
def test_a_flag_that_is_false_shares(place: Place, flag: str) -> None:
    """A draft that declares no copy of its own gets the verifier's, whatever it holds."""
    target, draft = verifier(), mtp()
    setattr(draft, flag, False)
    report = share_identical_weights(target, draft)
    assert pair_at(report, place).verdict is Verdict.DECLARED
    check_ties(report, target, draft)


@pytest.mark.parametrize(("place", "flag"), PLACES)
@pytest.mark.parametrize("value", [None, False])
def test_without_a_copy_a_missing_flag_is_a_false_one(place: Place, flag: str, value: Any) -> None:
    """A draft without a copy shares, whether its flag is absent or False."""
    target, draft = verifier(), mtp()
    if value is not None:
        setattr(draft, flag, value)
    owner, name = (draft.model, "embed_tokens") if "embed" in flag else (draft, "lm_head")
    setattr(owner, name, None)
    assert pair_at(share_identical_weights(target, draft), place).verdict is Verdict.DECLARED
    assert embedding_of(draft) is embedding_of(target) or draft.lm_head is target.lm_head


@pytest.mark.parametrize(("place", "flag"), PLACES)
@pytest.mark.parametrize("equal", [True, False])
def test_a_flag_that_is_true_compares(place: Place, flag: str, equal: bool) -> None:
    """A draft that declares its own copy shares exactly if the values are equal."""
    target, draft = verifier(), mtp()
    setattr(draft, flag, True)
    if equal:
        draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
        draft.lm_head.load_state_dict(target.lm_head.state_dict())
    before = snapshot(draft)
    pair = pair_at(share_identical_weights(target, draft), place)
    assert pair.verdict is (Verdict.DISCOVERED if equal else Verdict.DISTINCT)
    assert snapshot(draft) == before


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_a_flag_without_a_copy_keeps_the_heads_of_layers(container: type[nn.Module]) -> None:
    """A draft that declares a head and has only those of its layers keeps these."""
    target, draft = verifier(), mtp(container=container)
    draft.has_own_lm_head = True
    draft.lm_head = None
    own = layer_heads(draft)
    before = [bits(head) for head in own]
    report = share_identical_weights(target, draft)
    assert all(a is b for a, b in zip(layer_heads(draft), own, strict=True))
    assert [bits(head) for head in own] == before
    verdicts = [pair.verdict for pair in report.pairs if pair.place is Place.LAYER_HEAD]
    assert verdicts == [Verdict.DISTINCT] * 2


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_heads_of_layers_follow_a_declared_head(container: type[nn.Module]) -> None:
    """Layers compute logits through their own heads, so that these become the verifier's, too."""
    target, draft = verifier(), mtp(container=container)
    draft.has_own_lm_head = False
    report = share_identical_weights(target, draft)
    assert all(head is target.lm_head.weight for head in layer_heads(draft))
    check_ties(report, target, draft)


def test_heads_that_are_one_module_already() -> None:
    """One module as the head of verifier, draft and layers is one pair, found as it was."""
    target, draft = verifier(), mtp()
    draft.lm_head = target.lm_head
    for layer in draft.model.layers.children():
        layer.get_submodule("shared_head").head = target.lm_head
    report = share_identical_weights(target, draft)
    (pair,) = (pair for pair in report.pairs if pair.verdict is Verdict.ALREADY)
    assert len(pair.draft) == 3
    assert report.bytes_saved == 0


def test_a_quantized_head_that_is_one_module_already() -> None:
    """A layer without a plain weight that both models hold is told as shared, tensor by tensor."""
    target, draft = verifier(), mtp(layers=())
    packed = nn.Module()
    packed.register_buffer("weight_packed", torch.zeros(4, 4, dtype=torch.int32))
    packed.register_buffer("weight_scale", torch.ones(4))
    target.lm_head = draft.lm_head = packed
    report = share_identical_weights(target, draft)
    heads = [pair for pair in report.pairs if pair.place is Place.OUTPUT_HEAD]
    assert [(pair.verdict, pair.draft[0]) for pair in heads] == [
        (Verdict.ALREADY, "lm_head.weight_packed"),
        (Verdict.ALREADY, "lm_head.weight_scale"),
    ]
    check_ties(report, target, draft)


@pytest.mark.parametrize("embedding", ["embed_tokens", "embedding"])
@pytest.mark.parametrize("wrap", [lambda model: model, Conditional], ids=["text", "multi-modal"])
def test_the_embedding_of_the_language_model(embedding: str, wrap: Callable[[Any], Any]) -> None:
    """The verifier's embedding is found under both names, and inside multi-modal models."""
    target, draft = verifier(embedding=embedding), mtp()
    draft.has_own_embed_tokens = draft.has_own_lm_head = False
    outer = wrap(target)
    report = share_identical_weights(outer, draft)
    assert embedding_of(draft) is embedding_of(target)
    assert draft.lm_head.weight is target.lm_head.weight
    check_ties(report, outer, draft)


def test_a_head_beside_the_language_model() -> None:
    """A multi-modal verifier may hold its head itself, outside its language model."""
    target, draft = verifier(), mtp()
    outer = Conditional(target)
    outer.lm_head = target.lm_head
    target.lm_head = None
    draft.has_own_lm_head = False
    report = share_identical_weights(outer, draft, places=[Place.OUTPUT_HEAD, Place.LAYER_HEAD])
    assert {pair.verifier for pair in report.shared} == {"lm_head.weight"}


@pytest.mark.parametrize("side", ["verifier", "draft"])
def test_a_head_that_is_the_embedding(side: str) -> None:
    """A tied model may use one module for both; the other's head is compared with that."""
    target, draft = verifier(), mtp(layers=())
    tied = target if side == "verifier" else draft
    tied.lm_head = tied.model.embed_tokens
    for table in (draft.model.embed_tokens, draft.lm_head):
        table.load_state_dict(target.lm_head.state_dict())
    report = share_identical_weights(target, draft, places=[Place.OUTPUT_HEAD])
    assert pair_at(report, Place.OUTPUT_HEAD).verdict is Verdict.DISCOVERED
    assert draft.lm_head.weight is target.lm_head.weight


@pytest.mark.parametrize("there", [True, False], ids=["buffer", "none"])
def test_index_buffers_reach_every_holder(there: bool) -> None:
    """Each module of the draft that refers to an index buffer, or to none yet, gets it."""
    buffer = torch.zeros(4, 2, dtype=torch.int32)
    target = verifier(buffer=buffer)
    draft = mtp(buffer=torch.ones(4, 2, dtype=torch.int32) if there else None)
    holders = [module for module in draft.modules() if hasattr(module, INDEX_BUFFER)]
    assert len(holders) == (5 if there else 4)
    report = share_identical_weights(target, draft)
    assert all(getattr(module, INDEX_BUFFER) is buffer for module in holders)
    check_ties(report, target, draft)


def test_a_verifier_without_an_index_buffer() -> None:
    """Attributes without a buffer on either side are nothing to tell of."""
    report = share_identical_weights(verifier(), mtp())
    assert not [pair for pair in report.pairs if pair.place is Place.INDEX_BUFFER]


@pytest.mark.parametrize(("place", "flag"), PLACES)
@pytest.mark.parametrize("value", [None, True, False])
def test_a_pipeline_stage_without_the_layer(place: Place, flag: str, value: Any) -> None:
    """A verifier's stage that owns no embedding, or no head, lends none, whatever flags say."""
    target, draft = verifier(), mtp()
    if "embed" in flag:
        target.model.embed_tokens = Missing()
    else:
        target.lm_head = Missing()
    if value is not None:
        setattr(draft, flag, value)
    before = snapshot(draft)
    report = share_identical_weights(target, draft, places=[place, Place.LAYER_HEAD])
    assert pair_at(report, place).cause is Cause.NOT_IN_VERIFIER
    assert snapshot(draft) == before


@pytest.mark.parametrize(("place", "flag"), PLACES)
def test_a_stage_that_lacks_what_the_draft_needs(place: Place, flag: str) -> None:
    """A draft without a copy on a stage that can't lend one is an error that names it."""
    target, draft = verifier(), mtp()
    if place is Place.INPUT_EMBEDDING:
        target.model.embed_tokens = Missing()
        draft.model.embed_tokens.to("meta")
    else:
        target.lm_head = Missing()
        draft.lm_head.to("meta")
    setattr(draft, flag, False)
    with pytest.raises(IncompleteError, match="embed_tokens" if "embed" in flag else "lm_head"):
        share_identical_weights(target, draft)


@pytest.mark.parametrize("place", [Place.INPUT_EMBEDDING, Place.OUTPUT_HEAD])
def test_a_draft_on_a_stage_of_its_own(place: Place) -> None:
    """A stand-in in the draft stays: another stage of the draft has the layer."""
    target, draft = verifier(), mtp()
    if place is Place.INPUT_EMBEDDING:
        draft.model.embed_tokens = Missing()
    else:
        draft.lm_head = Missing()
    report = share_identical_weights(target, draft)
    assert pair_at(report, place).cause is Cause.NOT_IN_DRAFT
    assert any(isinstance(module, Missing) for module in draft.modules())


@pytest.mark.parametrize("adapted", ["verifier", "draft", "both"])
def test_layers_with_adapters(adapted: str) -> None:
    """The draft does not use the verifier's adapters: base layers are shared, on either side."""
    target, draft = verifier(), mtp()
    draft.has_own_embed_tokens = False
    weight = embedding_of(target)
    if adapted != "draft":
        target.model.embed_tokens = WithLora(target.model.embed_tokens)
    if adapted != "verifier":
        draft.model.embed_tokens = WithLora(draft.model.embed_tokens)
    report = share_identical_weights(target, draft)
    assert embedding_of(draft) is weight
    assert isinstance(draft.model.embed_tokens, WithLora) is (adapted != "verifier")
    check_ties(report, target, draft)


@pytest.mark.parametrize(
    "wrap",
    [GraphWrapper, lambda model: GraphWrapper(GraphWrapper(model)), torch.compile],
    ids=["graph", "micro-batches of graphs", "compiled"],
)
def test_wrappers_are_taken_off(wrap: Callable[[Any], Any]) -> None:
    """Wrappers that capture graphs, cut batches or compile are taken off both models."""
    target = verifier()
    draft = twin(target)
    outer = wrap(Conditional(target)), wrap(draft)
    report = share_identical_weights(*outer)
    assert embedding_of(draft) is embedding_of(target)
    assert len(report.shared) == 2
    check_ties(report, *outer)


@pytest.mark.parametrize("listed", [True, False])
def test_heads_in_a_list(listed: bool) -> None:
    """Medusa's heads, several or one in all places, are compared with the verifier's head."""
    target = verifier()
    draft = nn.Module()
    heads = [twin(target.lm_head) for _ in range(2)]
    if listed:
        draft.lm_heads = nn.ModuleList(heads)
        nn.init.zeros_(heads[1].weight)
    else:
        draft.lm_head = heads[0]
        draft.lm_heads = [heads[0]] * 2  # type: ignore[assignment]
    report = share_identical_weights(target, draft)
    place = Place.LAYER_HEAD if listed else Place.OUTPUT_HEAD
    found = [pair.verdict for pair in report.pairs if pair.place is place]
    assert found == [Verdict.DISCOVERED, Verdict.DISTINCT][: 2 if listed else 1]
    # Parameters are replaced, not modules: the list would keep the old one.
    assert heads[0].weight is target.lm_head.weight


class TestEqualOnly:
    """`equal_only`, for an engine that has heeded flags and empty places itself."""

    @pytest.mark.parametrize("equal", [True, False])
    def test_flags_count_for_nothing(self, equal: bool) -> None:
        """A flag that a standalone draft inherits from its class never costs it its weights."""

        class Standalone(Causal):
            has_own_embed_tokens = has_own_lm_head = False

        target = verifier()
        draft = Standalone(twin(target if equal else verifier(seed=1)).model)
        before = snapshot(draft)
        pair = pair_at(
            share_identical_weights(target, draft, equal_only=True), Place.INPUT_EMBEDDING
        )
        assert pair.verdict is (Verdict.DISCOVERED if equal else Verdict.DISTINCT)
        assert snapshot(draft) == before

    def test_empty_places_stay_empty(self) -> None:
        """What the engine has left out is left out."""
        target, draft = verifier(), mtp()
        draft.lm_head = None
        report = share_identical_weights(target, draft, equal_only=True)
        assert draft.lm_head is None
        assert pair_at(report, Place.OUTPUT_HEAD).cause is Cause.NOT_IN_DRAFT

    @pytest.mark.parametrize("side", ["verifier", "draft", "both"])
    def test_what_has_no_content_is_left_alone(self, side: str) -> None:
        """A tensor without bytes equals nothing, and is no error here."""
        target = verifier()
        draft = twin(target)
        for model, name in ((target, "verifier"), (draft, "draft")):
            if side in (name, "both"):
                model.model.embed_tokens.to("meta")
        report = share_identical_weights(target, draft, equal_only=True)
        assert not pair_at(report, Place.INPUT_EMBEDDING).verdict.shared
        assert pair_at(report, Place.OUTPUT_HEAD).verdict is Verdict.DISCOVERED


def test_a_dry_run_changes_nothing() -> None:
    """A dry run tells what would be shared, and leaves both models as they are."""
    target = verifier()
    draft = twin(target)
    own = dict(draft.named_parameters())
    told = share_identical_weights(target, draft, dry_run=True)
    assert all(own[name] is parameter for name, parameter in draft.named_parameters())
    assert told == share_identical_weights(target, draft)
