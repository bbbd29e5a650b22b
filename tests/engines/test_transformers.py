from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.core_model_loading import Chunk, Interleave, Transpose, WeightConverter

from tests.engines.small import MAKERS, llama, mixtral
from weightsync.core.errors import QuarantinedError, UnsupportedError
from weightsync.core.types import Target
from weightsync.engines.transformers import TransformersEngine
from weightsync.layout.plan import Layout
from weightsync.testing.models import tiny_pair

V, D = Target.VERIFIER, Target.DRAFT


def fill(
    layout: Layout, live: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> None:
    """Write tensors into live parameters as the layout says."""
    for name, value in values.items():
        for place in layout.tensors[name].placements:
            used = [a for a in place.axes if a is not None]
            order = used + [d for d in range(value.ndim) if d not in used]
            box = value[place.source.slices].permute(order).reshape(place.dest.sizes)
            live[place.parameter].detach()[place.dest.slices] = box


@pytest.mark.parametrize("kind", MAKERS)
def test_names_are_those_of_the_saved_folder(kind: str, tmp_path: Path) -> None:
    """Each tensor of the folder is in the layout, with its shape; further names are ties only."""
    model = MAKERS[kind](0)
    layout = TransformersEngine(model).targets[V].layout
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    plans = {name: plan for name, plan in layout.tensors.items() if not plan.composite}
    assert {n: tuple(t.shape) for n, t in saved.items()}.items() <= {
        n: p.shape for n, p in plans.items()
    }.items()
    owned = {layout.tensors[n].placements[0].parameter for n in saved}
    storages = {layout.parameters[p].storage for p in owned}
    for name in plans.keys() - saved.keys():
        assert layout.parameters[name].storage in storages


@pytest.mark.parametrize("kind", MAKERS)
def test_filling_by_the_layout_equals_loading_the_folder(kind: str, tmp_path: Path) -> None:
    """Another model's folder, put where the layout says, makes the same model bit for bit."""
    source, model = MAKERS[kind](1), MAKERS[kind](0)
    source.save_pretrained(tmp_path)
    engine = TransformersEngine(model)
    target = engine.targets[V]
    fill(target.layout, target.tensors(), load_file(tmp_path / "model.safetensors"))
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), loaded[name].view(torch.uint8)), name


def test_layout_of_a_loaded_model_is_that_of_a_new_one(tmp_path: Path) -> None:
    """What `from_pretrained` remembers of its conversion changes no name."""
    model = mixtral()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    mine, theirs = (TransformersEngine(m).targets[V].layout.tensors for m in (model, loaded))
    assert mine == theirs


def test_fused_parameters_have_their_own_name_too() -> None:
    """A trainer with the same classes sends `gate_up_proj`; it is marked as composite."""
    model = mixtral()
    layout = TransformersEngine(model).targets[V].layout
    prefix = "model.layers.0.mlp.experts"
    assert layout.tensors[f"{prefix}.gate_up_proj"].composite
    assert layout.tensors[f"{prefix}.gate_up_proj"].shape == (3, 32, 8)
    other = mixtral(1)
    names = {n: t for n, t in other.state_dict().items() if n in layout.tensors}
    assert names.keys() == model.state_dict().keys()
    fill(layout, TransformersEngine(model).targets[V].tensors(), names)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), other.state_dict()[name].view(torch.uint8))


def test_transposed_checkpoints_are_written_through_their_axes() -> None:
    """A conversion that turns a matrix gives a placement that turns it back."""
    model = llama()
    model.__dict__["_weight_conversions"] = [
        WeightConverter("mlp.w2.weight", "mlp.down_proj.weight", [Transpose(0, 1)])
    ]
    layout = TransformersEngine(model).targets[V].layout
    plan = layout.tensors["model.layers.0.mlp.w2.weight"]
    assert plan.shape == (16, 8)
    assert plan.placements[0].axes == (1, 0)
    assert layout.tensors["model.layers.0.mlp.down_proj.weight"].composite


def test_what_boxes_can_not_express_keeps_its_own_name() -> None:
    """Rows that a checkpoint interleaves are addressed as the module has them, and only so."""
    model = llama()
    model.__dict__["_weight_conversions"] = [
        WeightConverter(
            "mlp.w13.weight",
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            [Interleave(0), Chunk(0)],
        )
    ]
    layout = TransformersEngine(model).targets[V].layout
    assert not any("w13" in name for name in layout.tensors)
    assert not layout.tensors["model.layers.0.mlp.gate_proj.weight"].composite
    assert layout.tensors.keys() == model.state_dict().keys()


def test_plain_modules_are_refused() -> None:
    """The error names the engine for them."""
    with pytest.raises(TypeError, match=r"Tiny is no model of transformers; use ModuleEngine"):
        TransformersEngine(tiny_pair()[0])  # type: ignore[arg-type]


def test_an_encoder_can_be_served_but_not_asked_for_text() -> None:
    """Names and commits work for any model; `generate` says what is missing."""
    engine = TransformersEngine(MAKERS["clip_text"](0))
    with pytest.raises(UnsupportedError, match="CLIPTextModel does not generate"):
        engine.generate([1])


def test_a_draft_in_step_is_accepted_and_a_stale_one_is_not() -> None:
    """The counts show whether the draft agrees, and the text is the verifier's in both cases."""
    verifier, draft = llama(0), llama(0)
    alone = TransformersEngine(llama(0)).generate([1, 2], max_new_tokens=21, do_sample=False)
    engine = TransformersEngine(verifier, draft, num_proposed=4)
    good = engine.generate([1, 2], max_new_tokens=21, do_sample=False)
    assert (good.proposed, good.accepted) == (16, 16)
    draft.load_state_dict(llama(7).state_dict())
    bad = engine.generate([1, 2], max_new_tokens=21, do_sample=False)
    assert bad.accepted < good.accepted
    assert bad.steps > good.steps
    assert alone.tokens == good.tokens == bad.tokens
    assert (alone.proposed, alone.accepted, alone.steps) == (0, 0, 21)


def test_counts_of_two_threads_do_not_mix() -> None:
    """Each call of `generate` counts its own forward passes."""
    engine = TransformersEngine(llama(0), llama(0))
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(engine.generate, [1, 2], max_new_tokens=n, do_sample=False)
            for n in (21, 11)
        ]
        counts = [(job.result().proposed, job.result().steps) for job in jobs]
    assert counts == [(16, 5), (8, 3)]


def test_commits_between_the_steps_of_a_running_request() -> None:
    """Fifty commits of both models get through while requests run, and each request finishes."""
    verifier, draft = llama(0), llama(0, num_hidden_layers=1)
    engine = TransformersEngine(verifier, draft)
    versions = [llama(seed).state_dict() for seed in range(2)]
    stop, stepped = threading.Event(), threading.Semaphore(0)
    verifier.register_forward_hook(lambda *_: stepped.release())

    def serve() -> list[int]:
        lengths = []
        while not stop.is_set():
            generation = engine.generate([1, 2], max_new_tokens=16, do_sample=True)
            lengths.append(len(generation.tokens))
        return lengths

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(serve) for _ in range(2)]
        for i in range(50):
            assert stepped.acquire(timeout=60)
            with engine.gate.exclusive(60):
                live = engine.targets[V].tensors()
                fill(engine.targets[V].layout, live, versions[i % 2])
                engine.committed({V: live.keys()})
        stop.set()
        lengths = [length for job in jobs for length in job.result()]
    assert set(lengths) == {16}


def test_a_quarantined_draft_stops_assisted_generation() -> None:
    """The refusal reaches the caller of `generate`, and leaves the gate open."""
    engine = TransformersEngine(llama(0), llama(0))
    engine.gate.quarantine(D, "half written")
    with pytest.raises(QuarantinedError, match="half written"):
        engine.generate([1, 2], max_new_tokens=4)
    with engine.gate.exclusive(0):
        pass


def test_closing_leaves_the_model_as_it_was() -> None:
    """No hook remains, so that the model can be pickled and served anew."""
    model = llama()
    TransformersEngine(model).close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
