from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from weightsync_client import Fleet, verify

from tests.vllm import checkpoints
from tests.vllm.engine import address_of, generate, push, running, worker_of
from tests.vllm.models import MODELS
from tests.vllm.proof import see
from weightsync.core.errors import CommitRolledBackError
from weightsync.core.types import CacheReset, Scope, Target

Tensors = Mapping[str, torch.Tensor]


def one_part(tensors: Tensors, part: str) -> dict[str, torch.Tensor]:
    """Return the tensors with a part in their names."""
    return {name: tensor for name, tensor in tensors.items() if part in name}


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3 moe"])
def test_a_part_of_a_fused_parameter_is_updated(tmp_path: Path, model: str, weights: str) -> None:
    """One of the projections that vLLM fuses, sent alone, gives what a fresh engine sees."""
    made = MODELS[model]
    old = made.tensors(1)
    query = one_part(made.tensors(2), "layers.0.self_attn.q_proj")
    mixed = {**old, **query}

    with running(made.write(tmp_path / "old", old)) as llm:
        before = see(llm)
        push(llm, query, "mixed", scope=Scope.PARTIAL)
        after = see(llm)
    with running(made.write(tmp_path / "mixed", mixed)) as llm:
        assert see(llm) == after
    assert after.differs_from(before)


def test_a_compiled_model_sees_new_weights(
    llama: Path, new: checkpoints.Tensors, tmp_path: Path
) -> None:
    """Graphs that were compiled at start use the weights that came later."""
    with running(llama, enforce_eager=False) as llm:
        before = generate(llm)
        push(llm, new, "new")
        after = generate(llm)
    with running(checkpoints.write(tmp_path / "new", checkpoints.LLAMA, new)) as llm:
        assert generate(llm) == after != before


def test_a_failed_commit_leaves_the_old_tokens(
    llama: Path, new: checkpoints.Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a module can't be packed anew, every module holds the old weights again."""
    with running(llama) as llm:
        before = generate(llm)
        method = worker_of(llm).get_model().model.layers[1].mlp.down_proj.quant_method
        process, calls = method.process_weights_after_loading, iter([True])

        def fail_once(module: torch.nn.Module) -> None:
            if next(calls, False):
                raise RuntimeError("no memory for the packed weights")
            process(module)

        monkeypatch.setattr(method, "process_weights_after_loading", fail_once)
        with pytest.raises(CommitRolledBackError, match="no memory"):
            push(llm, new, "new")
        assert generate(llm) == before
        push(llm, new, "new")
        assert generate(llm) != before


def test_nothing_is_replaced(llama: Path, new: checkpoints.Tensors, weights: str) -> None:
    """Parameters keep their identity and their memory through commits."""
    with running(llama) as llm:
        model = worker_of(llm).get_model()
        before = _places(model)
        push(llm, new, "new")
        assert _places(model) == before


def test_a_worker_tells_what_it_holds(llama: Path, weights: str) -> None:
    """Names, shapes, versions and digests are those of the checkpoint."""
    tensors = checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 2)
    with running(llama) as llm, Fleet([address_of(llm)]) as fleet:
        push(llm, tensors, "new")
        worker = fleet.workers[0]
        info = worker.info()
        listed = {t.name: t.shape for t in worker.tensors(frozenset({Target.VERIFIER}))}
        assert info.engine == "vllm"
        assert info.targets[0].weight_version == "new"
        assert listed == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert verify(fleet, tensors).equal


def test_a_tied_head_is_sent_under_both_names(tmp_path: Path) -> None:
    """A state dict names a tied head twice; the worker takes it, and it is one storage."""
    config = MODELS["llama tied"].config
    old, new = (checkpoints.values(checkpoints.shapes(config), seed) for seed in (1, 2))
    both = {**new, "lm_head.weight": new["model.embed_tokens.weight"]}
    with running(checkpoints.write(tmp_path / "old", config, old)) as llm:
        push(llm, both, "new")
        updated = generate(llm)
    with running(checkpoints.write(tmp_path / "new", config, new)) as llm:
        assert generate(llm) == updated


LONG = [[(7 * i) % 500 + 3 for i in range(70)]]
CACHED = {"enable_prefix_caching": True, "block_size": 32}


def test_no_prefix_of_old_weights_is_used(
    llama: Path, new: checkpoints.Tensors, tmp_path: Path
) -> None:
    """A commit resets vLLM's prefix cache before the next request, and says so."""
    with running(llama, **CACHED) as llm, Fleet([address_of(llm)]) as fleet:
        generate(llm, LONG)
        assert cache_reset(fleet, new) is CacheReset.DONE
        after = generate(llm, LONG)
    with running(checkpoints.write(tmp_path / "new", checkpoints.LLAMA, new)) as llm:
        assert generate(llm, LONG) == after


def test_the_cache_may_be_left_to_the_caller(llama: Path, new: checkpoints.Tensors) -> None:
    """Who resets the cache himself is told that it is old, and has wrong tokens until then."""
    config = {"weightsync": {"cache_after_commit": "keep"}}
    with (
        running(llama, additional_config=config, **CACHED) as llm,
        Fleet([address_of(llm)]) as fleet,
    ):
        generate(llm, LONG)
        assert cache_reset(fleet, new) is CacheReset.FAILED
        stale = generate(llm, LONG)
        llm.reset_prefix_cache()
        assert generate(llm, LONG) != stale


def cache_reset(fleet: Fleet, tensors: Tensors) -> CacheReset:
    """Commit all tensors, and return what became of the cache."""
    with fleet.update(version="new") as session:
        session.push(tensors)
        commit = session.finish().workers[0].commit
    assert commit is not None
    return commit.cache_reset


def _places(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: (id(p), p.data_ptr()) for name, p in named}
