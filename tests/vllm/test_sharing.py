from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from vllm import LLM
from vllm.config import CompilationMode, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from weightsync_client import Fleet

from tests.vllm import checkpoints
from tests.vllm.drafts import PAIRS, Made, Tensors
from tests.vllm.engine import address_of, generate, running, worker_of
from tests.vllm.test_drafts import BOTH, observed
from weightsync.cli.main import app
from weightsync.core.errors import CommitFailedError, CommitRolledBackError, SharedWeightError
from weightsync.core.types import SharedTensorPolicy, Target
from weightsync.loader import Verdict

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UNSHARE = SharedTensorPolicy.UNSHARE

Copies = Callable[[Tensors, Tensors], Tensors]
"""Makes a draft's tensors from its own and the verifier's, some of them equal."""


def with_tables(draft: Tensors, verifier: Tensors) -> Tensors:
    """Return a draft whose embedding and head are the verifier's."""
    return draft | {name: verifier[name] for name in (EMBEDDING, HEAD)}


def with_one_head(draft: Tensors, verifier: Tensors) -> Tensors:
    """Return a draft of several heads, one of which is the verifier's."""
    return draft | {"medusa_heads.1.1.weight": verifier[HEAD]}


def made_of(kind: str, folder: Path, tensors: tuple[Tensors, Tensors]) -> Made:
    """Write a pair of verifier and draft."""
    pair = PAIRS[kind]
    assert pair.draft is not None
    verifier, draft = tensors
    return Made(
        pair,
        checkpoints.write(folder / "verifier", pair.verifier, verifier),
        checkpoints.write(folder / "draft", pair.draft, draft),
        verifier,
        draft,
    )


def sharing_of(llm: LLM) -> Any:
    """Return what the service in the worker has found shared."""
    return worker_of(llm).weight_transfer_engine._engine.sharing


def groups(llm: LLM) -> dict[str, list[str]]:
    """Return the tensors of the draft that are one with the verifier's, as the command tells."""
    result = CliRunner().invoke(app, ["sharing", "--to", address_of(llm), "--json"])
    assert result.exit_code == 0, result.output
    told = [json.loads(line)["tensors"] for line in result.output.splitlines()]
    found = {}
    for names in told:
        draft = [name.removeprefix("draft:") for name in names if name.startswith("draft:")]
        if draft and names[0].startswith("verifier:"):
            found[names[0]] = draft
    return found


WIDENED = [
    ("draft model", with_tables, "packed"),
    ("draft model", with_tables, "plain"),
    ("medusa", with_one_head, "packed"),
]


@pytest.mark.parametrize(("kind", "copies", "weights"), WIDENED, indirect=["weights"])
def test_what_vllm_leaves_apart_becomes_one(
    tmp_path: Path, kind: str, copies: Copies, weights: str
) -> None:
    """Equal weights that vLLM keeps twice are one: the draft follows, and can't write them."""
    del weights
    old, new = (PAIRS[kind].make(tmp_path / f"seed {seed}", seed) for seed in (1, 2))
    draft = copies(old.draft_tensors, old.verifier_tensors)
    one = made_of(kind, tmp_path / "one", (old.verifier_tensors, draft))
    follows = copies(draft, new.verifier_tensors)
    two = made_of(kind, tmp_path / "two", (new.verifier_tensors, follows))
    shared = {name for name in draft if follows[name] is not draft[name]}

    with running(one.verifier, **one.options) as llm, Fleet([address_of(llm)]) as fleet:
        report = sharing_of(llm).report
        assert {pair.verdict for pair in report.shared} == {Verdict.DISCOVERED}
        nbytes = sum(draft[name].numel() * draft[name].itemsize for name in shared)
        assert report.bytes_saved == nbytes
        assert {name for names in groups(llm).values() for name in names} == shared
        before = observed(llm)

        session = fleet.update(version="draft", target=Target.DRAFT)
        session.push(follows)
        with pytest.raises(SharedWeightError, match="verifier"):
            session.settle()
        session.abort()
        assert observed(llm) == before

        with fleet.update(version="two", target=Target.VERIFIER) as session:
            session.push(new.verifier_tensors)
            session.finish()
        after = observed(llm)

    with running(two.verifier, **two.options) as llm:
        assert observed(llm) == after
    assert after != before


LEFT_TO_VLLM: list[dict[str, Any]] = [
    {"additional_config": {"weightsync": {"share": False}}},
    {"load_format": "dummy"},
]


@pytest.mark.parametrize("how", LEFT_TO_VLLM, ids=["off", "dummy"])
def test_sharing_can_be_left_to_vllm(
    tmp_path: Path, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Switched off, or of dummy weights, a standalone draft keeps equal ones, and they are told."""
    old = PAIRS["draft model"].make(tmp_path / "old", 1)
    draft = with_tables(old.draft_tensors, old.verifier_tensors)
    made = made_of("draft model", tmp_path / "made", (old.verifier_tensors, draft))
    options = {**made.options, **how}
    with (
        caplog.at_level(logging.INFO, "weightsync.server"),
        running(made.verifier, **options) as llm,
    ):
        assert not sharing_of(llm).report.shared
        assert groups(llm) == {}
        with (
            Fleet([address_of(llm)]) as fleet,
            fleet.update(version="own", target=Target.DRAFT) as session,
        ):
            session.push(old.draft_tensors)
            session.finish()
    told = [record.getMessage() for record in caplog.records if "place=" in record.getMessage()]
    assert len(told) == 2
    assert all("verdict='not shared'" in line and "caller" in line for line in told)


SHARED_BY_VLLM: Mapping[str, dict[str, list[str]]] = {
    "eagle": {f"verifier:{EMBEDDING}": [EMBEDDING], f"verifier:{HEAD}": [HEAD]},
    "dflash": {f"verifier:{EMBEDDING}": [EMBEDDING], f"verifier:{HEAD}": [HEAD]},
    "deepseek": {
        f"verifier:{EMBEDDING}": [EMBEDDING],
        f"verifier:{HEAD}": [HEAD, "model.layers.2.shared_head.head.weight"],
    },
}


@pytest.mark.parametrize("kind", SHARED_BY_VLLM)
def test_what_vllm_shares_is_told(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Log, report and command name each tensor that a draft holds of the verifier's."""
    made = PAIRS[kind].make(tmp_path / "made", 1)
    with (
        caplog.at_level(logging.INFO, "weightsync.server"),
        running(made.verifier, **made.options) as llm,
    ):
        assert groups(llm) == SHARED_BY_VLLM[kind]
        report = sharing_of(llm).report
        assert {pair.verdict for pair in report.shared} == {Verdict.ALREADY}
        assert {name for pair in report.shared for name in pair.draft} == {
            name for names in SHARED_BY_VLLM[kind].values() for name in names
        }
    told = [record.getMessage() for record in caplog.records if "place=" in record.getMessage()]
    assert len(told) == len(report.pairs)
    by_vllm = [line for line in told if "shared_by='vllm'" in line and "num_bytes=" in line]
    assert len(by_vllm) == len(report.shared)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def equal_pair(tmp_path: Path) -> tuple[Made, Tensors]:
    """Return an EAGLE pair whose embeddings vLLM makes one, and other weights for the draft."""
    kind = "eagle with its own embedding"
    made = PAIRS[kind].make(tmp_path / "made", 1)
    draft = made.draft_tensors | {"embed_tokens.weight": made.verifier_tensors[EMBEDDING]}
    fresh = PAIRS[kind].make(tmp_path / "fresh", 2).draft_tensors
    return made_of(kind, tmp_path / "equal", (made.verifier_tensors, draft)), fresh


def test_vllms_own_draft_session_harms_the_verifier_and_ours_does_not(
    equal_pair: tuple[Made, Tensors],
) -> None:
    """A session of vLLM's own strands and overwrites the verifier's embedding; ours refuses."""
    made, fresh = equal_pair
    with running(made.verifier, **made.options) as llm, Fleet([address_of(llm)]) as fleet:
        worker = worker_of(llm)
        verifier, draft = worker.get_model(), worker.get_draft_model()
        assert draft.model.embed_tokens is verifier.model.embed_tokens
        before, tokens = bits(verifier.model.embed_tokens.weight), generate(llm)

        session = fleet.update(version="new", target=Target.DRAFT)
        session.push(fresh)
        with pytest.raises(SharedWeightError, match="embed_tokens"):
            session.finish()
        session.abort()
        assert bits(verifier.model.embed_tokens.weight) == before
        assert generate(llm) == tokens
        sharing_of(llm).check()

        # The engine that vLLM uses with NCCL, without the broadcast: that needs a GPU.
        config = worker.vllm_config
        with set_current_vllm_config(config):
            theirs = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="nccl"), config, worker.device, verifier
            )
            theirs.set_weight_update_target(draft, config.speculative_config.draft_model_config)
            theirs.start_weight_update()
            assert verifier.model.embed_tokens.weight.is_meta
            draft.load_weights(iter(fresh.items()))
            theirs.finish_weight_update()
        assert bits(verifier.model.embed_tokens.weight) == bits(fresh["embed_tokens.weight"])
        assert generate(llm) != tokens


TABLES = {
    "eagle with its own embedding": ["embed_tokens.weight"],
    "draft model": [EMBEDDING, HEAD],
}
"""What a draft may have of its own, and equal to its verifier's."""


@pytest.mark.parametrize("kind", TABLES)
def test_a_draft_gets_weights_of_its_own_again(tmp_path: Path, kind: str) -> None:
    """On request a draft's session cuts what vLLM has shared, or we; then both go their ways."""
    old, new = (PAIRS[kind].make(tmp_path / f"seed {seed}", seed) for seed in (1, 2))
    tables = {name: EMBEDDING if "embed" in name else HEAD for name in TABLES[kind]}
    equal = {name: old.verifier_tensors[theirs] for name, theirs in tables.items()}
    one = made_of(kind, tmp_path / "one", (old.verifier_tensors, old.draft_tensors | equal))
    with running(one.verifier, **one.options) as llm, Fleet([address_of(llm)]) as fleet:
        shared = groups(llm)
        before = observed(llm)
        with fleet.update(version="new", target=Target.DRAFT, shared_tensors=UNSHARE) as session:
            session.push(new.draft_tensors)
            session.finish()
        middle = observed(llm)
        assert middle[0] == before[0]
        left = {name for names in groups(llm).values() for name in names}
        assert left == {n for names in shared.values() for n in names} - equal.keys()
        with fleet.update(version="new", target=Target.VERIFIER) as session:
            session.push(new.verifier_tensors)
            session.finish()
        after = observed(llm)
        sharing_of(llm).check()

    with running(new.verifier, **new.options) as llm:
        assert observed(llm) == after
    assert middle[1] != before[1]


def test_a_tie_that_is_cut_is_noticed(
    equal_pair: tuple[Made, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where graphs hold a tie we don't cut it; if somebody else does, no commit is made over it."""
    made, fresh = equal_pair
    with running(made.verifier, **made.options) as llm, Fleet([address_of(llm)]) as fleet:
        before = observed(llm)
        with monkeypatch.context() as patch:
            # To compile takes half a minute.
            compilation = worker_of(llm).vllm_config.compilation_config
            patch.setattr(compilation, "mode", CompilationMode.VLLM_COMPILE)
            session = fleet.update(version="own", target=Target.DRAFT, shared_tensors=UNSHARE)
            session.push(fresh)
            with pytest.raises(CommitRolledBackError, match="graphs"):
                session.finish()
        assert observed(llm) == before
        sharing_of(llm).check()

        draft = worker_of(llm).get_draft_model()
        tied = draft.model.embed_tokens
        draft.model.embed_tokens = copy.deepcopy(tied)
        session = fleet.update(version="cut", target=Target.VERIFIER)
        session.push(made.verifier_tensors)
        with pytest.raises(CommitFailedError, match="no longer hold one storage"):
            session.finish()

        draft.model.embed_tokens = tied
        with fleet.update(version="whole", target=BOTH) as session:
            session.push(made.verifier_tensors, target=Target.VERIFIER)
            session.push(made.draft_tensors, target=Target.DRAFT)
            session.finish()
        assert observed(llm) == before
