"""Real checkpoint folders of transformers models, loaded as a pair."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.loader.models import bits, flip_one_bit, llama, pair_at, snapshot, twin, write
from weightsync.core.errors import IncompleteError, InvalidRequestError
from weightsync.loader import (
    Cause,
    Place,
    Verdict,
    check_ties,
    load_pair,
    share_identical_weights,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(model: Any, folder: Path, *, without: Collection[str] = ()) -> Path:
    """Save a checkpoint, leaving out some of its tensors."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if name not in without}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def draft_of(verifier: Any, **config: Any) -> Any:
    """Return a draft of one layer with copies of the verifier's embedding and head."""
    draft = llama(layers=1, seed=1, **config)
    draft.model.embed_tokens.load_state_dict(verifier.model.embed_tokens.state_dict())
    draft.lm_head.load_state_dict(verifier.lm_head.state_dict())
    return draft


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_with_equal_copies(tmp_path: Path, tied: bool) -> None:
    """Copies that both checkpoints carry are loaded, found equal and held once."""
    verifier = llama(tied=tied)
    pair = load_pair(
        save(verifier, tmp_path / "verifier"),
        str(save(draft_of(verifier, tied=tied), tmp_path / "draft")),
    )
    assert {entry.verdict for entry in pair.report.pairs} == {Verdict.DISCOVERED}
    assert pair.draft.lm_head.weight is pair.verifier.lm_head.weight
    assert snapshot(pair.verifier) == snapshot(verifier)
    check_ties(pair.report, pair.verifier, pair.draft)


@pytest.mark.parametrize("without", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
def test_a_draft_without_copies(tmp_path: Path, without: tuple[str, ...]) -> None:
    """B11: what the draft's checkpoint leaves out is the verifier's, not a random start value."""
    verifier, draft = llama(), llama(layers=1, seed=1)
    pair = load_pair(
        save(verifier, tmp_path / "verifier"), save(draft, tmp_path / "draft", without=without)
    )
    declared = {entry.draft[0] for entry in pair.report.shared}
    assert declared == set(without)
    assert {entry.verdict for entry in pair.report.shared} == {Verdict.DECLARED}
    expected = snapshot(draft) | {
        name: held for name, held in snapshot(verifier).items() if name in without
    }
    assert snapshot(pair.draft) == expected


@pytest.mark.parametrize("verifier_tied", [True, False])
def test_a_tied_draft_without_copies(tmp_path: Path, verifier_tied: bool) -> None:
    """B19: a tied draft without its one table holds the verifier's embedding and head."""
    verifier, draft = llama(tied=verifier_tied), llama(layers=1, seed=1, tied=True)
    pair = load_pair(
        save(verifier, tmp_path / "verifier"),
        save(draft, tmp_path / "draft", without=[EMBEDDING]),
    )
    assert pair.draft.lm_head.weight is pair.verifier.lm_head.weight
    assert pair.draft.model.embed_tokens.weight is pair.verifier.model.embed_tokens.weight


def test_one_bit_in_a_checkpoint(tmp_path: Path) -> None:
    """B07: one different bit in the draft's checkpoint keeps the draft's head."""
    verifier = llama()
    draft = draft_of(verifier)
    flip_one_bit(draft.lm_head.weight)
    pair = load_pair(save(verifier, tmp_path / "verifier"), save(draft, tmp_path / "draft"))
    assert pair_at(pair.report, Place.OUTPUT_HEAD).verdict is Verdict.DISTINCT
    assert pair_at(pair.report, Place.INPUT_EMBEDDING).verdict is Verdict.DISCOVERED


@pytest.mark.parametrize(
    ("config", "cause"),
    [({"hidden_size": 8}, Cause.SHAPE), ({"vocab_size": 32}, Cause.SHAPE), ({}, Cause.DTYPE)],
    ids=["width", "vocabulary", "dtype"],
)
def test_a_draft_of_its_own_kind(tmp_path: Path, config: dict[str, Any], cause: Cause) -> None:
    """B08, B12: another width, vocabulary or dtype is told, and the draft stays as it is."""
    draft = llama(layers=1, **config)
    if cause is Cause.DTYPE:
        draft.bfloat16()
    pair = load_pair(save(llama(), tmp_path / "verifier"), save(draft, tmp_path / "draft"))
    assert {entry.cause for entry in pair.report.pairs} == {cause}
    assert snapshot(pair.draft) == snapshot(draft)


def test_one_dtype_for_both(tmp_path: Path) -> None:
    """B08: the rule is bytes after loading, so a common dtype makes rounded copies equal."""
    verifier = llama()
    draft = draft_of(verifier).bfloat16()
    folders = save(verifier, tmp_path / "verifier"), save(draft, tmp_path / "draft")
    assert load_pair(*folders).report.shared == ()
    assert len(load_pair(*folders, dtype=torch.bfloat16).report.shared) == 2


def test_checkpoints_that_lack_layers(tmp_path: Path) -> None:
    """B13: a layer that transformers would fill with random values is an error in either model."""
    name = "model.layers.0.mlp.up_proj.weight"
    whole = save(llama(), tmp_path / "whole")
    part = save(llama(), tmp_path / "part", without=[name])
    with pytest.raises(IncompleteError, match=r"draft.*up_proj"):
        load_pair(whole, part)
    with pytest.raises(IncompleteError, match=r"verifier's checkpoint.*up_proj") as caught:
        load_pair(part, whole)
    assert caught.value.subjects == (name,)
    headless = save(llama(), tmp_path / "headless", without=[HEAD])
    with pytest.raises(IncompleteError, match=HEAD):
        load_pair(headless, whole)


def test_a_draft_that_lacks_what_the_verifier_cannot_lend(tmp_path: Path) -> None:
    """B11: a head missing from a draft of another vocabulary is an error, not random values."""
    draft = llama(layers=1, vocab_size=32)
    with pytest.raises(IncompleteError, match=HEAD):
        load_pair(
            save(llama(), tmp_path / "verifier"),
            save(draft, tmp_path / "draft", without=[HEAD]),
        )


def test_what_is_no_folder(tmp_path: Path) -> None:
    """A name that is no checkpoint folder is refused, not looked for on the network."""
    with pytest.raises(InvalidRequestError, match=r"no config\.json"):
        load_pair("gpt2", tmp_path)


def test_an_updated_pair_generates_as_fresh_models_do(tmp_path: Path) -> None:
    """After a write into the verifier, assisted generation equals that of freshly loaded models."""
    verifier = llama()
    pair = load_pair(
        save(verifier, tmp_path / "verifier"),
        save(llama(layers=1, seed=1), tmp_path / "draft", without=[EMBEDDING, HEAD]),
    )
    pair.verifier.load_state_dict(llama(seed=3).state_dict())
    check_ties(pair.report, pair.verifier, pair.draft)
    fresh = llama(layers=1)
    fresh.load_state_dict(pair.draft.state_dict())
    ids = torch.arange(4)[None]
    assert bits(pair.draft(ids).logits) == bits(fresh(ids).logits)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    live: Any = pair.verifier
    tokens = live.generate(ids, attention_mask=mask, assistant_model=pair.draft, **settings)
    assert torch.equal(tokens, llama(seed=3).generate(ids, attention_mask=mask, **settings))


def test_models_of_two_architectures() -> None:
    """A draft of another architecture shares what is equal all the same."""
    verifier = llama()
    torch.manual_seed(1)
    draft = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=False,
        )
    )
    draft.lm_head.load_state_dict(verifier.lm_head.state_dict())
    report = share_identical_weights(verifier, draft)
    assert [pair.verdict for pair in report.pairs] == [Verdict.DISTINCT, Verdict.DISCOVERED]


def test_layers_copied_from_the_verifier() -> None:
    """A draft cut out of its verifier shares all its layers on request, by name or by value."""
    verifier = llama(layers=3)
    draft = llama(layers=1, seed=1)
    draft.model.layers[0].load_state_dict(twin(verifier.model.layers[2]).state_dict())
    report = share_identical_weights(verifier, draft, all_equal=True)
    shared = {pair.draft[0]: pair.verifier for pair in report.shared}
    assert shared["model.layers.0.mlp.up_proj.weight"] == "model.layers.2.mlp.up_proj.weight"
    # Norms that were never trained are equal by chance; only the name tells which belong together.
    assert shared["model.norm.weight"] == "model.norm.weight"
    before = bits(draft.model.layers[0].mlp.up_proj.weight)
    write(verifier.model.layers[0].mlp.up_proj.weight, 1.0)
    assert bits(draft.model.layers[0].mlp.up_proj.weight) == before
