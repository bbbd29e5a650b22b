from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from weightsync_client import Fleet, verify

from tests.vllm import checkpoints
from tests.vllm.engine import generate, running
from weightsync.core.errors import UnsupportedError
from weightsync.core.types import Target
from weightsync.integrations.vllm.clients import LLMClient

SHORT = 5  # ranks that share a core take their time


@contextmanager
def in_processes(model: Path, directory: Path, **options: Any) -> Iterator[tuple[LLM, Fleet]]:
    """Run a vLLM whose workers are processes, and find them as a trainer does."""
    with (
        running(
            model,
            distributed_executor_backend="mp",
            additional_config={"weightsync": {"directory": str(directory)}},
            worker_extension_cls="tests.vllm.faults.Faults",
            **options,
        ) as llm,
        Fleet.from_vllm(directory) as fleet,
    ):
        yield llm, fleet


def fresh_tokens(folder: Path, tensors: checkpoints.Tensors) -> list[list[int]]:
    """Return what a fresh engine with one rank says to a checkpoint."""
    with running(checkpoints.write(folder, checkpoints.LLAMA, tensors)) as llm:
        return generate(llm, num_tokens=SHORT)


def test_a_worker_process_is_updated_from_outside(
    llama: Path, new: checkpoints.Tensors, tmp_path: Path
) -> None:
    """A client finds the worker by its directory and puts new weights into it, as it runs."""
    old = checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 1)
    with in_processes(llama, tmp_path / "ranks", enable_prefix_caching=True) as (llm, fleet):
        before = generate(llm, num_tokens=SHORT)
        undisturbed = generate(llm, num_tokens=100)
        # Equal weights, so that no token may change; vLLM plans steps ahead here.
        with disturbing(fleet, old):
            assert generate(llm, num_tokens=100) == undisturbed
        push(fleet, new)
        after = generate(llm, num_tokens=SHORT)
        assert verify(fleet, new).equal
    assert after == fresh_tokens(tmp_path / "new", new) != before


def test_two_ranks_switch_together(llama: Path, new: checkpoints.Tensors, tmp_path: Path) -> None:
    """Ranks switch in one call of vLLM's or not at all; one by one they refuse to."""
    old = checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 1)
    with in_processes(llama, tmp_path / "ranks", tensor_parallel_size=2) as (llm, fleet):
        assert [w.info().coordinates.tp_rank for w in fleet.workers] == [0, 1]
        before = generate(llm, num_tokens=SHORT)

        session = fleet.update(version="new")
        session.push(new)
        session.settle()
        with pytest.raises(UnsupportedError, match="2 ranks"):
            fleet.workers[0].finish(session.ticket.session_ids[0])
        session.abort()

        with Fleet.from_vllm(LLMClient(llm)) as together:
            refused: Any
            for refused in ([{}], [{}, {"path": "x"}], {"session_id": "none"}):
                with pytest.raises(RuntimeError, match=r"for 1 ranks|path|none"):
                    llm.update_weights({"update_info": refused})
            with pytest.raises(RuntimeError, match="no draft model"):
                llm.start_draft_weight_update()

            llm.collective_rpc("fail_next_packing", args=(1,))
            with pytest.raises(RuntimeError, match="no memory"):
                push(together, new)
            assert versions(fleet) == ["", ""]
            assert generate(llm, num_tokens=SHORT) == before

            push(together, new)
            assert versions(fleet) == ["new", "new"]
            assert llm.get_weight_version() == "new"
            after = generate(llm, num_tokens=SHORT)
            assert verify(fleet, new).equal
            push(together, old)
            assert generate(llm, num_tokens=SHORT) == before
    assert after == fresh_tokens(tmp_path / "new", new) != before


def push(fleet: Fleet, tensors: checkpoints.Tensors) -> None:
    """Commit all tensors."""
    with fleet.update(version="new") as session:
        session.push(tensors)
        session.finish()


@contextmanager
def disturbing(fleet: Fleet, tensors: checkpoints.Tensors) -> Iterator[None]:
    """Commit again and again within the block, at least once."""
    done = threading.Event()

    def trainer() -> None:
        push(fleet, tensors)
        while not done.is_set():
            push(fleet, tensors)

    thread = threading.Thread(target=trainer)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def versions(fleet: Fleet) -> list[str]:
    """Return what the ranks say that their verifier holds."""
    held = [{s.target: s.weight_version for s in w.info().targets} for w in fleet.workers]
    return [one[Target.VERIFIER] for one in held]
