"""Pairs under vLLM's second model runner, which needs CUDA. Not run yet: see docs/vllm.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm import LLM
from weightsync_client import Fleet

from tests.vllm.drafts import PAIRS
from tests.vllm.engine import address_of, generate, running, worker_of
from tests.vllm.test_drafts import acceptance, push_both
from tests.vllm.test_sharing import SHARED_BY_VLLM, groups, made_of, with_tables
from weightsync.core.errors import SharedWeightError
from weightsync.core.types import Target
from weightsync.loader import check_ties, share_identical_weights

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def second_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose vLLM's second model runner, with graphs, as it is by default on CUDA."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def models(llm: LLM) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return verifier and draft, as both runners give them out."""
    worker = worker_of(llm)
    assert ".gpu.model_runner" in type(worker.model_runner).__module__
    return worker.get_model(), worker.get_draft_model()


def observed(llm: LLM) -> tuple[list[list[int]], float]:
    """Return the verifier's tokens and which part of the proposals it accepted."""
    accepted = acceptance(llm)
    return generate(llm), accepted


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "deepseek", "mimo", "dflash", "draft model"])
def test_a_pair_is_updated_together(tmp_path: Path, kind: str) -> None:
    """After one commit of both, tokens and acceptance are those of a fresh engine; and back."""
    old, new = (PAIRS[kind].make(tmp_path / str(seed), seed) for seed in (1, 2))
    options = {"enforce_eager": False}
    with running(old.verifier, **(old.options | options)) as llm:
        tables = [p.data_ptr() for model in models(llm) for p in model.parameters()]
        before = observed(llm)
        push_both(llm, new, "new")
        after = observed(llm)
        push_both(llm, old, "old")
        assert observed(llm) == before
        assert [p.data_ptr() for model in models(llm) for p in model.parameters()] == tables
    with running(new.verifier, **(new.options | options)) as llm:
        assert observed(llm) == after
    assert after[0] != before[0]


@pytest.mark.parametrize("kind", SHARED_BY_VLLM)
def test_what_the_runner_shares_is_told(tmp_path: Path, kind: str) -> None:
    """What the second runner shares while it loads is found as it is, and nothing is left over."""
    made = PAIRS[kind].make(tmp_path / "made", 1)
    with running(made.verifier, **made.options) as llm:
        assert groups(llm) == SHARED_BY_VLLM[kind]
        report = share_identical_weights(*models(llm), equal_only=True, dry_run=True)
        check_ties(report, *models(llm))


def test_what_the_runner_leaves_apart_becomes_one(tmp_path: Path) -> None:
    """A standalone draft with equal tables holds the verifier's, also under captured graphs."""
    old, new = (PAIRS["draft model"].make(tmp_path / str(seed), seed) for seed in (1, 2))
    tensors = [
        (pair.verifier_tensors, with_tables(old.draft_tensors, pair.verifier_tensors))
        for pair in (old, new)
    ]
    one = made_of("draft model", tmp_path / "one", tensors[0])
    two = made_of("draft model", tmp_path / "two", tensors[1])
    options = {"enforce_eager": False}
    with (
        running(one.verifier, **(one.options | options)) as llm,
        Fleet([address_of(llm)]) as fleet,
    ):
        verifier, draft = models(llm)
        assert draft.get_parameter("lm_head.weight") is verifier.get_parameter("lm_head.weight")
        session = fleet.update(version="draft", target=Target.DRAFT)
        session.push(two.draft_tensors)
        with pytest.raises(SharedWeightError):
            session.settle()
        session.abort()
        with fleet.update(version="two", target=Target.VERIFIER) as session:
            session.push(two.verifier_tensors)
            session.finish()
        after = observed(llm)
    with running(two.verifier, **(two.options | options)) as llm:
        assert observed(llm) == after
