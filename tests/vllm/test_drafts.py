from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM
from weightsync_client import Fleet

from tests.vllm import checkpoints
from tests.vllm.drafts import PAIRS, Made
from tests.vllm.engine import address_of, generate, running, worker_of
from weightsync.core.errors import SharedWeightError, TargetAbsentError
from weightsync.core.types import CastPolicy, SharedTensorPolicy, Target

BOTH = (Target.VERIFIER, Target.DRAFT)
EQUAL = SharedTensorPolicy.ACCEPT_EQUAL


@contextmanager
def proposals(llm: LLM) -> Iterator[list[Any]]:
    """Note what the draft proposes within the block."""
    drafter = worker_of(llm).model_runner.drafter
    propose, seen = drafter.propose, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        made = propose(*args, **kwargs)
        seen.append(made.tolist() if isinstance(made, torch.Tensor) else made)
        return made

    drafter.propose = noting
    try:
        yield seen
    finally:
        drafter.propose = propose


def observed(llm: LLM) -> tuple[list[list[int]], list[Any]]:
    """Return the verifier's tokens and all that the draft proposed on the way."""
    with proposals(llm) as seen:
        return generate(llm), seen


# Plain weights matter where a draft derives something from them itself.
CASES = [
    *((kind, "packed") for kind in PAIRS),
    *((kind, "plain") for kind in ("eagle", "dflash", "deepseek")),
]


@pytest.mark.parametrize(("kind", "weights"), CASES, indirect=["weights"])
def test_a_pair_is_updated_together(tmp_path: Path, kind: str, weights: str) -> None:
    """After one commit of both, tokens and proposals are those of a fresh engine; and back."""
    old, new = (PAIRS[kind].make(tmp_path / str(seed), seed) for seed in (1, 2))

    with running(old.verifier, **old.options) as llm:
        before = observed(llm)
        push_both(llm, new, "new")
        after = observed(llm)
        push_both(llm, old, "old")
        assert observed(llm) == before

    with running(new.verifier, **new.options) as llm:
        assert observed(llm) == after
    assert after[0] != before[0]
    assert after[1] != before[1]


def push_both(llm: LLM, made: Made, version: str) -> None:
    """Commit verifier and draft in one session."""
    with (
        Fleet([address_of(llm)]) as fleet,
        fleet.update(version=version, target=BOTH, cast=CastPolicy.ALLOW) as session,
    ):
        session.push(made.verifier_tensors, target=Target.VERIFIER)
        session.push(made.draft_tensors, target=Target.DRAFT)
        session.finish()


def test_a_draft_alone_is_updated(tmp_path: Path) -> None:
    """A draft that equals its verifier has all accepted; a stale one next to nothing."""
    config = checkpoints.LLAMA
    one, two = (checkpoints.values(checkpoints.shapes(config), seed) for seed in (1, 2))
    folder = checkpoints.write(tmp_path / "one", config, one)
    speculative = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}

    with running(folder, speculative_config=speculative) as llm, Fleet([address_of(llm)]) as fleet:
        assert acceptance(llm) == 1.0
        for target in BOTH:
            # Embedding and head are equal at first, and so the verifier's.
            with fleet.update(version="two", target=target, shared_tensors=EQUAL) as session:
                session.push(two)
                session.finish()
            if target is Target.VERIFIER:
                assert acceptance(llm) < 0.1
        assert acceptance(llm) == 1.0


def acceptance(llm: LLM) -> float:
    """Return which part of the proposals of one generation the verifier accepted."""

    def counts() -> list[int]:
        found = {metric.name: metric for metric in llm.get_metrics()}
        names = ("accepted_tokens", "draft_tokens")
        return [found[f"vllm:spec_decode_num_{name}"].value for name in names]

    before = counts()
    generate(llm)
    accepted, proposed = (b - a for a, b in zip(before, counts(), strict=True))
    return accepted / proposed


def test_a_draft_does_not_write_what_the_verifier_owns(tmp_path: Path) -> None:
    """A draft's own copy of an embedding that vLLM has shared is refused; the verifier stays."""
    pair = PAIRS["eagle with its own embedding"]
    made = pair.make(tmp_path / "made", 1)
    # vLLM shares an embedding if it finds both equal.
    draft = {
        **made.draft_tensors,
        "embed_tokens.weight": made.verifier_tensors["model.embed_tokens.weight"],
    }
    assert pair.draft is not None
    folder = checkpoints.write(tmp_path / "equal", pair.draft, draft)
    options = {"speculative_config": made.options["speculative_config"] | {"model": str(folder)}}
    fresh = pair.make(tmp_path / "fresh", 2).draft_tensors

    with running(made.verifier, **options) as llm, Fleet([address_of(llm)]) as fleet:
        before = generate(llm)
        session = fleet.update(version="new", target=Target.DRAFT)
        session.push(fresh)
        with pytest.raises(SharedWeightError, match="embed_tokens"):
            session.settle()
        session.abort()
        assert generate(llm) == before

        own = {name: tensor for name, tensor in fresh.items() if name != "embed_tokens.weight"}
        with fleet.update(version="new", target=Target.DRAFT) as session:
            session.push(own)
            session.finish()
        assert generate(llm) == before


def test_without_a_draft_its_session_is_refused(llama: Path) -> None:
    """A vLLM that does not speculate has no draft, and says so."""
    with (
        running(llama) as llm,
        Fleet([address_of(llm)]) as fleet,
        pytest.raises(TargetAbsentError),
    ):
        fleet.update(version="new", target=Target.DRAFT)
