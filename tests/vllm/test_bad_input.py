from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from weightsync_client import Fleet

from tests.vllm import checkpoints
from tests.vllm.engine import PROMPTS, address_of, generate, running, worker_of
from weightsync.core.errors import (
    IncompleteError,
    NothingAppliedError,
    ShapeMismatchError,
    TargetAbsentError,
    UnknownTensorError,
)
from weightsync.core.types import Scope, Target, TargetState

# vLLM computes these itself and skips what old checkpoints have of them.
SKIPPED = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}

OLD = checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Run one vLLM for several tests, each of which leaves it with the old weights."""
    folder = tmp_path_factory.mktemp("skipped") / "model"
    with running(checkpoints.write(folder, checkpoints.LLAMA, OLD | SKIPPED)) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokens(llm: LLM) -> list[list[int]]:
    """Return what the old weights say."""
    return generate(llm)


@pytest.fixture
def fleet(llm: LLM, tokens: list[list[int]]) -> Iterator[Fleet]:
    """Find that vLLM as a trainer does; behind the test it must serve the old weights."""
    with Fleet([address_of(llm)]) as fleet:
        yield fleet
        assert fleet.workers[0].info().targets[0].state is TargetState.READY
    assert generate(llm) == tokens


def push(fleet: Fleet, tensors: checkpoints.Tensors, **options: Any) -> None:
    """Commit tensors."""
    with fleet.update(version="next", **options) as session:
        session.push(tensors)
        session.finish()


def test_a_draft_that_is_not_there_is_refused(fleet: Fleet) -> None:
    """A session for a draft is refused where vLLM has none, and does not reach the verifier."""
    with pytest.raises(TargetAbsentError, match="no draft"):
        push(fleet, OLD, target=Target.DRAFT)


def test_what_vllm_skips_is_taken_and_left_out(
    llm: LLM, fleet: Fleet, new: checkpoints.Tensors
) -> None:
    """A tensor that vLLM skips on purpose is listed without regions, and may be sent or not."""
    listed = {t.name: t for t in fleet.workers[0].tensors() if not t.regions}
    assert set(listed) == set(SKIPPED)
    push(fleet, new | SKIPPED)
    after = generate(llm)
    push(fleet, new)
    assert generate(llm) == after
    push(fleet, OLD)


def test_what_the_checkpoint_lacks_is_named(fleet: Fleet, new: checkpoints.Tensors) -> None:
    """A name that vLLM would skip is refused if its checkpoint has no such tensor, or ignored."""
    more = new | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    with pytest.raises(UnknownTensorError, match=r"layers\.1\.self_attn\.rotary_emb\.inv_freq"):
        push(fleet, more)
    push(fleet, more, ignore_names=["*.inv_freq"])
    push(fleet, OLD)


def test_what_is_skipped_alone_is_nothing(fleet: Fleet) -> None:
    """A partial session of which vLLM uses nothing is refused."""
    with pytest.raises(NothingAppliedError):
        push(fleet, SKIPPED, scope=Scope.PARTIAL)


@pytest.mark.parametrize("scope", Scope)
def test_names_of_another_architecture_are_refused(fleet: Fleet, scope: Scope) -> None:
    """A tensor that only another model has is named."""
    tensors = checkpoints.values(checkpoints.shapes(checkpoints.QWEN3), 2)
    with pytest.raises(UnknownTensorError, match="q_norm"):
        push(fleet, tensors, scope=scope)


@pytest.mark.parametrize("scope", Scope)
def test_shapes_of_another_size_are_refused(fleet: Fleet, scope: Scope) -> None:
    """A tensor of a model with other sizes is named, with both shapes."""
    tensors = checkpoints.values(checkpoints.shapes(checkpoints.LLAMA | {"vocab_size": 500}), 2)
    with pytest.raises(ShapeMismatchError, match=r"embed_tokens.*512.*500"):
        push(fleet, tensors, scope=scope)


def test_a_model_with_fewer_layers_is_incomplete(fleet: Fleet) -> None:
    """A full session lists what it lacks; nothing of it went live."""
    tensors = checkpoints.values(
        checkpoints.shapes(checkpoints.LLAMA | {"num_hidden_layers": 1}), 2
    )
    with pytest.raises(IncompleteError, match=r"layers\.1\."):
        push(fleet, tensors)


def begin(llm: LLM, request_id: str, num_tokens: int) -> None:
    """Add a request, and run its first step."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    llm.llm_engine.add_request(request_id, prompt, params)
    for _ in range(num_tokens):
        llm.llm_engine.step()


def test_a_paused_vllm_is_updated(llm: LLM, fleet: Fleet, new: checkpoints.Tensors) -> None:
    """A request that was frozen before an update goes on with the new weights, from its prefix."""
    core: Any = llm.llm_engine.engine_core
    begin(llm, "frozen", 5)
    core.engine_core.pause_scheduler(mode="keep")
    push(fleet, new)
    assert not llm.llm_engine.step()
    core.engine_core.resume_scheduler()
    made: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        made = [*llm.llm_engine.step()[0].outputs[0].token_ids]
    (rest,) = generate(llm, [PROMPTS[0] + made[:5]], num_tokens=11)
    push(fleet, OLD)
    (old,) = generate(llm, PROMPTS[:1])
    assert made == old[:5] + rest
    assert rest != old[5:]


@pytest.mark.parametrize("half", ["execute_model", "sample_tokens"])
def test_a_step_that_failed_holds_nothing_up(
    llm: LLM,
    fleet: Fleet,
    new: checkpoints.Tensors,
    half: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an error in either half of a step, updates are committed and requests answered."""
    runner = worker_of(llm).model_runner
    run = getattr(runner, half)

    def fail(*args: object, **kwargs: object) -> None:
        run(*args, **kwargs)
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(runner, half, fail)
        with pytest.raises(RuntimeError, match="on fire"):
            begin(llm, half, 1)
    if half == "execute_model":
        runner.sample_tokens(None)  # lets vLLM forget the step
    llm.llm_engine.abort_request([half])
    push(fleet, new)
    assert generate(llm) != generate(llm, num_tokens=3)
    push(fleet, OLD)


def test_a_trainer_waits_for_a_vllm_that_starts(
    llama: Path, new: checkpoints.Tensors, tmp_path: Path
) -> None:
    """A trainer that is there first waits until the models are loaded; its update is complete."""
    config = {"weightsync": {"directory": str(tmp_path / "ranks")}}
    errors: list[BaseException] = []

    def train() -> None:
        try:
            with Fleet.from_vllm(tmp_path / "ranks", timeout=300) as fleet:
                push(fleet, new)
        except BaseException as error:
            errors.append(error)
            raise

    trainer = threading.Thread(target=train)
    trainer.start()
    with running(llama, additional_config=config) as llm:
        trainer.join()
        assert not errors
        updated = generate(llm)
    with running(checkpoints.write(tmp_path / "new", checkpoints.LLAMA, new)) as llm:
        assert generate(llm) == updated
