from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from weightsync_client import Fleet, verify

from tests.vllm import checkpoints, computing
from tests.vllm.computing import COMPUTING
from tests.vllm.drafts import Pair
from tests.vllm.engine import address_of, generate, push, running, worker_of
from tests.vllm.proof import see
from weightsync.core.errors import CommitRolledBackError
from weightsync.core.types import Scope, Target

BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "vocab_size": 512,
    "hidden_size": 128,
    "n_layer": 2,
    "n_head": 4,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def bloom() -> checkpoints.Shapes:
    """Yield the tensors of a BLOOM, whose queries, keys and values lie head by head."""
    hidden = BLOOM["hidden_size"]
    norms = ["word_embeddings_layernorm", "ln_f"]
    yield "word_embeddings.weight", (BLOOM["vocab_size"], hidden)
    for layer in range(BLOOM["n_layer"]):
        prefix = f"h.{layer}."
        norms += [f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm"]
        for name, rows, columns in (
            ("self_attention.query_key_value", 3 * hidden, hidden),
            ("self_attention.dense", hidden, hidden),
            ("mlp.dense_h_to_4h", 4 * hidden, hidden),
            ("mlp.dense_4h_to_h", hidden, 4 * hidden),
        ):
            yield f"{prefix}{name}.weight", (rows, columns)
            yield f"{prefix}{name}.bias", (rows,)
    for norm in norms:
        yield f"{norm}.weight", (hidden,)
        yield f"{norm}.bias", (hidden,)


def values(config: dict[str, Any], seed: int) -> checkpoints.Tensors:
    """Return random tensors for a model that computes."""
    if config is not BLOOM:
        return checkpoints.values(computing.shapes(config), seed)
    # Its layers must be heard beside the token that it reads, whose embedding is its head, too.
    tensors = checkpoints.values(bloom(), seed)
    return {n: 4 * t if n.startswith("h.") and t.ndim > 1 else t for n, t in tensors.items()}


# A tensor that is sent alone, and how many of them the model itself loads.
CASES = {
    "computing": (COMPUTING, computing.HALVES[0], 7),
    "looking": (computing.LOOKING, "model.embed_tokens.weight", 20),
    "bloom": (BLOOM, "h.0.self_attention.query_key_value.weight", 4),
}


@pytest.mark.parametrize(
    ("case", "weights"),
    [("computing", "packed"), ("computing", "plain"), ("looking", "packed"), ("bloom", "packed")],
    indirect=["weights"],
)
def test_tokens_are_those_of_a_fresh_engine(tmp_path: Path, case: str, weights: str) -> None:
    """After a full update, one tensor of a computed layer alone, and back."""
    config, alone, num_reloaded = CASES[case]
    old, new = (values(config, seed) for seed in (1, 2))
    one = {alone: old[alone] * 3}

    with running(checkpoints.write(tmp_path / "old", config, old)) as llm:
        before = places(llm)
        tokens = [generate(llm)]
        push(llm, new, "new")
        tokens.append(generate(llm))
        push(llm, one, "mixed", scope=Scope.PARTIAL)
        tokens.append(generate(llm))
        assert len(reloaded(llm)) == num_reloaded
        push(llm, old, "old")
        assert generate(llm) == tokens[0]
        assert places(llm) == before

    assert len({str(t) for t in tokens}) == len(tokens)
    for tensors, seen in ((new, tokens[1]), ({**new, **one}, tokens[2])):
        with running(checkpoints.write(tmp_path / str(id(tensors)), config, tensors)) as llm:
            assert generate(llm) == seen


def test_a_worker_tells_what_is_loaded_again(tmp_path: Path) -> None:
    """The list of tensors and the metrics say so; digests are those of what was sent."""
    old, new = (values(COMPUTING, seed) for seed in (1, 2))
    folder = checkpoints.write(tmp_path / "old", COMPUTING, old)
    options = {"additional_config": {"weightsync": {"metrics_port": 0}}}
    with running(folder, **options) as llm, Fleet([address_of(llm)]) as fleet:
        push(llm, new, "new")
        metrics = worker_of(llm).weight_transfer_engine.server.metrics_address
        with urllib.request.urlopen(f"http://{metrics}/metrics") as answer:
            page = answer.read().decode()
        layer = "model.layers.0.self_attn."
        assert reloaded(llm) == {
            *computing.SCALED,
            *computing.HALVES,
            *(f"{layer}{part}_proj.weight" for part in "qkv"),
        }
        assert f'weightsync_reloaded_tensors{{target="verifier"}} {len(reloaded(llm))}.0' in page
        assert verify(fleet, new).equal


def test_a_load_that_fails_leaves_the_old_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a layer can't be loaded again, the old weights serve on."""
    old, new = (values(COMPUTING, seed) for seed in (1, 2))
    with running(checkpoints.write(tmp_path / "old", COMPUTING, old)) as llm:
        before = generate(llm)
        model = worker_of(llm).get_model()
        load, calls = model.load_weights, iter([True])

        def fail_once(weights: computing.Weights) -> set[str]:
            if next(calls, False):
                raise RuntimeError("no memory to load with")
            loaded: set[str] = load(weights)
            return loaded

        monkeypatch.setattr(model, "load_weights", fail_once)
        with pytest.raises(CommitRolledBackError, match="no memory to load with"):
            push(llm, new, "new")
        assert generate(llm) == before
        push(llm, new, "new")
        assert generate(llm) != before


def test_a_draft_that_computes_is_that_of_a_fresh_engine(tmp_path: Path) -> None:
    """Its proposals follow an update of both models, and of the draft alone."""
    pair = Pair("draft_model", checkpoints.LLAMA, draft=COMPUTING, draft_shapes=computing.shapes)
    old, new = (pair.make(tmp_path / str(seed), seed) for seed in (1, 2))
    with running(old.verifier, **old.options) as llm, Fleet([address_of(llm)]) as fleet:
        before = see(llm)
        with fleet.update(version="new", target=(Target.VERIFIER, Target.DRAFT)) as session:
            session.push(new.verifier_tensors, target=Target.VERIFIER)
            session.push(new.draft_tensors, target=Target.DRAFT)
            session.finish()
        both = see(llm)
        with fleet.update(version="old", target=Target.DRAFT) as session:
            session.push(old.draft_tensors)
            session.finish()
        alone = see(llm)
    assert both.differs_from(before)
    assert alone.tokens == both.tokens
    with running(new.verifier, **new.options) as llm:
        assert see(llm) == both
    with running(new.verifier, **old.options) as llm:
        assert see(llm) == alone != both


def reloaded(llm: LLM) -> set[str]:
    """Return the tensors that the model itself loads."""
    with Fleet([address_of(llm)]) as fleet:
        listed = fleet.workers[0].tensors(frozenset({Target.VERIFIER}))
        return {tensor.name for tensor in listed if tensor.reloaded}


def places(llm: LLM) -> dict[str, tuple[int, int]]:
    """Return the parameters of the model and where they lie."""
    named = worker_of(llm).get_model().named_parameters(remove_duplicate=False)
    return {name: (id(p), p.data_ptr()) for name, p in named}
