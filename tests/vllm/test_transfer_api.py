from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from vllm import LLM
from weightsync_client import Fleet

from tests.vllm import checkpoints
from tests.vllm.engine import address_of, generate, running
from weightsync.core.errors import IncompleteError, SessionStateError, UnknownSessionError
from weightsync.core.types import Target


def update(llm: LLM, *session_ids: str, version: str = "new") -> None:
    """Let vLLM commit sessions, one for each rank, or what holds the verifier."""
    llm.start_weight_update()
    llm.update_weights({"update_info": [{"session_id": one} for one in session_ids] or {}})
    llm.finish_weight_update(version)


def test_vllm_commits_what_was_sent(llama: Path, new: checkpoints.Tensors, tmp_path: Path) -> None:
    """A session that was filled over gRPC goes live by vLLM's own calls, with its version."""
    with running(llama) as llm, Fleet([address_of(llm)]) as fleet:
        llm.init_weight_transfer_engine({"init_info": {}})

        def commit(session_ids: Sequence[str]) -> None:
            update(llm, *session_ids)

        with fleet.update(version="new") as session:
            session.push(new)
            assert session.finish(commit).committed
        assert llm.get_weight_version() == "new"
        assert fleet.workers[0].info().targets[0].weight_version == "new"
        seen = generate(llm)
    with running(checkpoints.write(tmp_path / "new", checkpoints.LLAMA, new)) as llm:
        assert generate(llm) == seen


def test_the_version_of_vllm_is_that_of_the_verifier(llama: Path, new: checkpoints.Tensors) -> None:
    """Also after a commit that vLLM did not make, and whatever it is told."""
    with running(llama) as llm, Fleet([address_of(llm)]) as fleet:
        assert llm.get_weight_version() == "default"
        with fleet.update(version="ours") as session:
            session.push(new)
        assert llm.get_weight_version() == "ours"
        llm.update_weight_version("theirs")
        assert llm.get_weight_version() == "ours"
        with fleet.update(version="next") as session:
            session.push(new)
            session.finish(lambda ids: update(llm, *ids, version="another"))
        assert llm.get_weight_version() == "next"


def test_calls_out_of_order_leave_no_trace(llama: Path, new: checkpoints.Tensors) -> None:
    """A caller that vanished in the middle of an update does not keep the next one out."""
    with running(llama) as llm, Fleet([address_of(llm)]) as fleet:
        llm.finish_weight_update()
        llm.start_weight_update()
        llm.start_weight_update()
        with fleet.update(version="new") as session:
            session.push(new)
            session.finish(lambda ids: update(llm, *ids))
        llm.shutdown_weight_transfer_engine()
        assert fleet.workers[0].info().targets[0].weight_version == "new"


def test_errors_come_back_and_the_engine_lives(llama: Path, new: checkpoints.Tensors) -> None:
    """Commits of nothing, of an unknown and of an unfinished session fail with the reason."""
    with running(llama) as llm, Fleet([address_of(llm)]) as fleet:
        before = generate(llm)
        with pytest.raises(SessionStateError, match="no session holds the verifier"):
            update(llm)
        with pytest.raises(UnknownSessionError):
            update(llm, "none")
        with fleet.update(version="new") as session:
            session.push({"model.norm.weight": new["model.norm.weight"]})
            session.settle()
            with pytest.raises(IncompleteError):
                update(llm)
            session.abort()
        llm.start_weight_update()
        with pytest.raises(ValueError, match="path"):
            llm.update_weights({"update_info": {"path": "model"}})
        assert generate(llm) == before


def test_a_draft_update_without_a_draft_is_refused(llama: Path) -> None:
    """VLLM itself refuses, and serves on."""
    with running(llama) as llm:
        with pytest.raises(RuntimeError, match="draft"):
            llm.start_draft_weight_update()
        assert fleet_targets(llm) == [Target.VERIFIER]


def fleet_targets(llm: LLM) -> list[Target]:
    """Return which models the worker has."""
    with Fleet([address_of(llm)]) as fleet:
        return [status.target for status in fleet.workers[0].info().targets]
