from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from weightsync_client import Fleet

from tests.vllm import checkpoints
from tests.vllm.drafts import PAIRS, Made
from tests.vllm.engine import address_of, generate, running
from tests.vllm.proof import Comparison, see
from weightsync.core.errors import SharedWeightError, TargetAbsentError
from weightsync.core.types import CastPolicy, SharedTensorPolicy, Target

BOTH = (Target.VERIFIER, Target.DRAFT)
EQUAL = SharedTensorPolicy.ACCEPT_EQUAL


def observed(llm: LLM) -> tuple[Any, Any]:
    """Return the verifier's tokens and all that the draft proposed on the way."""
    seen = see(llm)
    return seen.tokens, seen.proposals


# Plain weights matter where a draft derives something from them itself.
CASES = [
    *((kind, dtype, "packed") for kind in PAIRS for dtype in ("float32", "bfloat16")),
    *((kind, "float32", "plain") for kind in ("eagle", "dflash")),
    *((kind, "bfloat16", "plain") for kind in ("mimo", "deepseek")),
]


@pytest.mark.parametrize(("kind", "dtype", "weights"), CASES, indirect=["weights"])
def test_a_pair_is_updated_together(tmp_path: Path, kind: str, dtype: str, weights: str) -> None:
    """After one commit of both, tokens, logits and proposals are a fresh engine's; and back."""
    old, new = (PAIRS[kind].make(tmp_path / str(seed), seed) for seed in (1, 2))

    with running(old.verifier, **old.options | {"dtype": dtype}) as llm:
        before = see(llm)
        push_both(llm, new, "new")
        after = see(llm)
        push_both(llm, old, "old")
        back = see(llm)
    with running(new.verifier, **new.options | {"dtype": dtype}) as llm:
        Comparison(before, after, back, fresh=see(llm)).check()


def push_both(llm: LLM, made: Made, version: str) -> None:
    """Commit verifier and draft in one session."""
    with (
        Fleet([address_of(llm)]) as fleet,
        fleet.update(version=version, target=BOTH, cast=CastPolicy.ALLOW) as session,
    ):
        session.push(made.verifier_tensors, target=Target.VERIFIER)
        session.push(made.draft_tensors, target=Target.DRAFT)
        session.finish()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_a_draft_alone_proposes_as_a_fresh_one(tmp_path: Path, kind: str) -> None:
    """A draft that is updated alone proposes what it does in an engine that started with it."""
    old, new = (PAIRS[kind].make(tmp_path / str(seed), seed) for seed in (1, 2))

    with running(old.verifier, **old.options) as llm, Fleet([address_of(llm)]) as fleet:
        before = see(llm)
        for made in (new, old):
            with fleet.update(version="next", target=Target.DRAFT) as session:
                session.push(made.draft_tensors)
                session.finish()
            if made is new:
                after = see(llm)
        assert see(llm) == before
    assert after.tokens == before.tokens
    assert after.proposals != before.proposals
    with running(old.verifier, **new.options) as llm:
        assert see(llm) == after


def test_acceptance_follows_the_draft(tmp_path: Path) -> None:
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
