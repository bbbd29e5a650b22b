"""Where shared weights are found: layers, wrappers, nested models, buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from tests.loader.models import (
    VOCABULARY,
    WIDTH,
    Mtp,
    Tiny,
    bits,
    flip_one_bit,
    llama,
    pair_at,
    twin,
    write,
)
from weightsync.loader import Cause, Place, Verdict, check_ties, share_identical_weights

NAMES = [
    ("embed_tokens", "lm_head"),
    ("embedding", "embed_out"),
    ("wte", "output_layer"),
    ("word_embeddings", "output"),
    ("tok_embeddings", "output"),
    ("token_embedding", "unembed"),
    ("embed_in", "head"),
]


def named(embedding: str, head: str) -> nn.Module:
    """Return a model with a body, an embedding and a head of these names."""
    torch.manual_seed(0)
    model = nn.Module()
    model.model = nn.Module()
    model.model.register_module(embedding, nn.Embedding(VOCABULARY, WIDTH))
    model.register_module(head, nn.Linear(WIDTH, VOCABULARY, bias=False))
    return model


@pytest.mark.parametrize(("embedding", "head"), NAMES)
def test_plain_modules_are_searched_by_name(embedding: str, head: str) -> None:
    """The usual names of embeddings and heads are known, in either model."""
    verifier, draft = named("embed_tokens", "lm_head"), named(embedding, head)
    report = share_identical_weights(verifier, draft)
    assert {pair.draft for pair in report.shared} == {
        (f"model.{embedding}.weight",),
        (f"{head}.weight",),
    }
    check_ties(report, verifier, draft)


def test_containers_and_norms_of_the_same_name_are_passed_over() -> None:
    """A block called `output` or a norm called `embedding` is not taken for a table."""
    verifier, draft = named("wte", "lm_head"), named("wte", "lm_head")
    draft.output = nn.Sequential(nn.Linear(2, 2))
    draft.embedding = nn.LayerNorm(4)
    assert len(share_identical_weights(verifier, draft).shared) == 2


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_heads_of_mtp_layers(container: type[nn.Module]) -> None:
    """Each layer's head is compared with the verifier's head on its own."""
    verifier = Tiny()
    draft = Mtp(["0", "1", "2"], container)
    for layer in "012":
        draft.head_of(layer).load_state_dict(verifier.head.state_dict())
    flip_one_bit(draft.head_of("1").weight)
    report = share_identical_weights(verifier, draft)
    heads = [pair for pair in report.pairs if pair.place is Place.LAYER_HEAD]
    assert [(pair.draft[0], pair.verdict) for pair in heads] == [
        ("layers.0.shared_head.head.weight", Verdict.DISCOVERED),
        ("layers.1.shared_head.head.weight", Verdict.DISTINCT),
        ("layers.2.shared_head.head.weight", Verdict.DISCOVERED),
    ]
    assert pair_at(report, Place.OUTPUT_HEAD).cause is Cause.NOT_IN_DRAFT
    assert draft.head_of("0").weight is draft.head_of("2").weight is verifier.head.weight


def test_tied_heads_of_mtp_layers_stay_tied() -> None:
    """Layers that have one head among them are one pair."""
    verifier = Tiny()
    draft = Mtp("01", nn.ModuleList)
    draft.head_of("0").load_state_dict(verifier.head.state_dict())
    draft.head_of("1").weight = draft.head_of("0").weight
    pair = pair_at(share_identical_weights(verifier, draft), Place.LAYER_HEAD)
    assert len(pair.draft) == 2
    assert draft.head_of("1").weight is draft.head_of("0").weight is verifier.head.weight


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_without_a_head_of_the_model(flag: bool) -> None:
    """A draft that claims a head and has only the layers' keeps these; one that doesn't shares."""
    verifier = Tiny()
    draft = Mtp("01", nn.ModuleList)
    draft.has_own_lm_head = flag
    draft.lm_head = None
    report = share_identical_weights(verifier, draft)
    expected = Verdict.DISTINCT if flag else Verdict.DECLARED
    layers = [pair for pair in report.pairs if pair.place is Place.LAYER_HEAD]
    assert [pair.verdict for pair in layers] == [expected] * 2
    assert pair_at(report, Place.OUTPUT_HEAD).verdict is Verdict.DECLARED
    assert draft.lm_head is verifier.head


def test_empty_heads_of_mtp_layers() -> None:
    """A layer whose head is left empty holds the verifier's."""
    verifier = Tiny()
    draft = Mtp("01", nn.ModuleList)
    for layer in "01":
        draft.get_submodule(f"layers.{layer}.shared_head").head = None  # type: ignore[assignment]
    share_identical_weights(verifier, draft)
    assert draft.head_of("0") is draft.head_of("1") is verifier.head


@pytest.mark.parametrize("registered", [True, False])
def test_index_buffers(registered: bool) -> None:
    """B38: the verifier's scratch buffer replaces the draft's in every module that holds it."""

    def attach(model: Tiny, fill: int) -> torch.Tensor:
        buffer = torch.full((4, 2), fill, dtype=torch.int32)
        for module in (model, model.fc, model.head):
            if registered:
                module.register_buffer("topk_indices_buffer", buffer, persistent=False)
            else:
                setattr(module, "topk_indices_buffer", buffer)  # noqa: B010 - mypy knows no such
        return buffer

    verifier, draft = Tiny(), Tiny(seed=1)
    buffer = attach(verifier, 1)
    attach(draft, 2)
    report = share_identical_weights(verifier, draft)
    pair = pair_at(report, Place.INDEX_BUFFER)
    assert (pair.verdict, pair.num_bytes, pair.bytes_saved) == (Verdict.DECLARED, 32, 32)
    assert len(pair.draft) == 3
    assert all(module.topk_indices_buffer is buffer for module in (draft, draft.fc, draft.head))
    assert "topk_indices_buffer" not in draft.state_dict()
    check_ties(report, verifier, draft)
    draft.fc.topk_indices_buffer = buffer.clone()
    assert len(share_identical_weights(verifier, draft).shared) == 2


def test_index_buffers_of_another_shape() -> None:
    """Scratch space of another shape is kept, and so is one that the verifier doesn't have."""
    verifier, draft = Tiny(), Tiny(seed=1)
    draft.topk_indices_buffer = torch.zeros(3)
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INDEX_BUFFER).cause is Cause.NOT_IN_VERIFIER
    verifier.topk_indices_buffer = torch.zeros(4)
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INDEX_BUFFER).cause is Cause.SHAPE


class Wrapper(nn.Module):
    """A multi-modal model around a language model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.vision = nn.ModuleDict({"embedding": nn.Linear(3, 3)})
        self.language_model = inner


class Getter(nn.Module):
    """A wrapper that tells its language model by a method only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.thinker = inner

    def get_language_model(self) -> nn.Module:
        """Return the language model."""
        return self.thinker


class Graph:
    """A graph wrapper: no module, runs one."""

    def __init__(self, runnable: object) -> None:
        self.runnable = runnable

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.runnable(*args)  # type: ignore[operator]


class Unwrapping(Graph):
    """A wrapper that tells what it wraps by a method."""

    def unwrap(self) -> object:
        """Return what it wraps."""
        return self.runnable


class Module(nn.Module):
    """A wrapper that is a module, as DDP is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Adapted(nn.Module):
    """A LoRA layer around a base layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(WIDTH, 2, bias=False)


class Peft(nn.Module):
    """A model with adapters around a base model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": base})
        self.peft_config: dict[str, str] = {}

    def get_base_model(self) -> nn.Module:
        """Return the base model."""
        return self.base_model["model"]


def adapt_layers(model: Tiny) -> nn.Module:
    """Put adapters around embedding and head."""
    model.embed = Adapted(model.embed)  # type: ignore[assignment]
    model.head = Adapted(model.head)  # type: ignore[assignment]
    return model


def compile_layers(model: Tiny) -> nn.Module:
    """Compile embedding and head on their own."""
    model.embed = torch.compile(model.embed)  # type: ignore[assignment]
    model.head = torch.compile(model.head)  # type: ignore[assignment]
    return model


WRAPPERS: list[Callable[[Any], Any]] = [
    Wrapper,
    Getter,
    Graph,
    Unwrapping,
    Module,
    DataParallel,
    Peft,
    torch.compile,
    adapt_layers,
    compile_layers,
    lambda model: Graph(torch.compile(Module(Wrapper(adapt_layers(model))))),
]


@pytest.mark.parametrize("side", ["verifier", "draft", "both"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_are_looked_through(wrap: Callable[[Any], Any], side: str) -> None:
    """Whatever is around a model or its layers, on either side, the weights inside are shared."""
    verifier = Tiny()
    draft = twin(verifier)
    embed, head = verifier.embed.weight, verifier.head.weight
    own = draft.embed, draft.head
    outer = (
        wrap(verifier) if side != "draft" else verifier,
        wrap(draft) if side != "verifier" else draft,
    )
    report = share_identical_weights(*outer)
    assert {pair.verdict for pair in report.pairs} == {Verdict.DISCOVERED}
    assert own[0].weight is embed
    assert own[1].weight is head
    check_ties(report, *outer)


def test_names_start_at_the_model_inside_its_wrappers() -> None:
    """Wrappers around the whole model leave no trace in the names; a nested model does."""
    verifier = Tiny()
    draft = twin(verifier)
    report = share_identical_weights(torch.compile(verifier), Module(Wrapper(draft)))
    pair = pair_at(report, Place.INPUT_EMBEDDING)
    assert (pair.verifier, pair.draft) == ("embed.weight", ("language_model.embed.weight",))


def test_accessors_that_mean_something_else() -> None:
    """A method that takes arguments, or is not implemented, is no way to the embedding."""

    class Engine(Tiny):
        def get_input_embeddings(self, ids: torch.Tensor) -> torch.Tensor:
            """Embed ids, as some engines call it."""
            embedded: torch.Tensor = self.embed(ids)
            return embedded

        def get_output_embeddings(self) -> nn.Module:
            """Refuse, as models without a head do."""
            raise NotImplementedError

    verifier = Engine()
    assert len(share_identical_weights(verifier, twin(verifier)).shared) == 2


def test_a_scaled_embedding_is_plain() -> None:
    """A constant factor that no checkpoint carries does not make a layer quantized."""
    verifier = Tiny()
    verifier.embed.register_buffer("embed_scale", torch.tensor(2.0), persistent=False)
    assert len(share_identical_weights(verifier, twin(verifier)).shared) == 2


@pytest.mark.parametrize("compiled", ["verifier", "draft"])
def test_compiled_models_compute_with_the_shared_weight(compiled: str) -> None:
    """B69: a model compiled and run before it shares follows later writes of the verifier."""
    verifier, draft = Tiny(), Tiny(seed=1)
    draft.embed.load_state_dict(verifier.embed.state_dict())
    model = verifier if compiled == "verifier" else draft
    run = torch.compile(model, backend="eager")
    ids = torch.arange(5)
    run(ids)
    share_identical_weights(verifier, draft)
    write(verifier.embed.weight, 0.5)
    assert bits(run(ids)) == bits(model(ids))
    assert bits(run(ids)[0]) == bits(run(ids)[1])


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_models(tied: bool) -> None:
    """A draft of fewer layers shares embedding and head with its verifier, tied or not."""
    verifier = llama(layers=2, tied=tied)
    draft = llama(layers=1, seed=1, tied=tied)
    draft.model.embed_tokens.load_state_dict(verifier.model.embed_tokens.state_dict())
    draft.lm_head.load_state_dict(verifier.lm_head.state_dict())
    report = share_identical_weights(verifier, draft)
    assert {pair.verdict for pair in report.pairs} == {Verdict.DISCOVERED}
    assert report.bytes_saved == (1 if tied else 2) * 64 * 16 * 4
    assert draft.model.embed_tokens.weight is verifier.model.embed_tokens.weight
    assert draft.lm_head.weight is verifier.lm_head.weight
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) is tied
    ids = torch.arange(6)[None]
    before = draft(ids).logits
    write(verifier.model.embed_tokens.weight[2:4], 0.125)
    assert not torch.equal(before, draft(ids).logits)
    fresh = llama(layers=1, tied=tied)
    fresh.load_state_dict(draft.state_dict())
    assert bits(fresh(ids).logits) == bits(draft(ids).logits)
    check_ties(report, verifier, draft)


def test_a_sharded_or_sparse_weight_is_not_plain() -> None:
    """A table that is not one block of elements is told and left alone."""
    verifier, draft = Tiny(), Tiny(seed=1)
    draft.embed.weight = nn.Parameter(torch.eye(VOCABULARY, WIDTH).to_sparse())
    report = share_identical_weights(verifier, draft)
    assert pair_at(report, Place.INPUT_EMBEDDING).cause is Cause.NOT_PLAIN


def test_a_base_model_without_adapters_is_no_wrapper() -> None:
    """A model that can return its backbone keeps its head in view."""

    class Backbone(Tiny):
        def get_base_model(self) -> nn.Module:
            """Return the part without a head."""
            return self.embed

    verifier = Backbone()
    assert len(share_identical_weights(verifier, twin(verifier)).shared) == 2
