from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from weightsync_client import VllmServer

from tests.vllm import checkpoints
from tests.vllm.drafts import PAIRS
from tests.vllm.engine import address_of, generate, running
from tests.vllm.source import Tensors
from weightsync.core.errors import (
    EngineUnavailableError,
    IncompleteError,
    InvalidRequestError,
    TargetBusyError,
)
from weightsync.core.types import Target
from weightsync.integrations.vllm.clients import LLMClient
from weightsync.integrations.vllm.trainer import TrainerInfo, WeightSyncTrainer


def trainer_of(client: Any, source: WeightSource | None = None, **info: Any) -> WeightSyncTrainer:
    """Return what vLLM's factory makes."""
    made = WeightTransferTrainerFactory.trainer_init(
        TrainerInfo(**({"rank": 0} | info)), client=client, source=source
    )
    assert isinstance(made, WeightSyncTrainer)
    return made


def checksums(llm: LLM) -> list[dict[str, str]]:
    """Return what vLLM's weight checker says of the verifier."""
    return list(llm.collective_rpc("compute_weight_checksums"))


def held(trainer: WeightSyncTrainer) -> dict[Target, str]:
    """Return the versions that the worker tells."""
    (worker,) = trainer.fleet.workers
    return {status.target: status.weight_version for status in worker.info().targets}


@pytest.mark.parametrize("weights", ["plain"], indirect=True)
def test_a_trainer_of_vllm_updates_both_models(tmp_path: Path, weights: str) -> None:
    """Verifier, draft and both; tokens, version and checksums are those of a fresh engine."""
    old, new = (PAIRS["eagle"].make(tmp_path / str(seed), seed) for seed in (1, 2))
    with running(old.verifier, **old.options) as llm:
        before = generate(llm), checksums(llm)
        source = Tensors(new.verifier_tensors)
        trainer = trainer_of(LLMClient(llm), source)

        report = trainer.send_weights()
        assert report is not None
        assert report.committed
        assert llm.get_weight_version() == held(trainer)[Target.VERIFIER] == "1"
        assert trainer.send_draft_weights(new.draft_tensors.items()) is not None
        assert held(trainer) == {Target.VERIFIER: "1", Target.DRAFT: "2"}
        assert llm.get_weight_version() == "1"
        after = generate(llm), checksums(llm)

        source.tensors = old.verifier_tensors
        trainer.send_weights("old", draft=old.draft_tensors.items())
        assert held(trainer) == {Target.VERIFIER: "old", Target.DRAFT: "old"}
        assert llm.get_weight_version() == "old"
        assert (generate(llm), checksums(llm)) == before
        trainer.shutdown()
    with running(new.verifier, **new.options) as llm:
        assert (generate(llm), checksums(llm)) == after
    assert after[1] != before[1]


class Stumbling(LLMClient):
    """A client whose next call of one kind fails, before or after vLLM was called."""

    failing = ""

    def start_weight_update(self) -> None:
        """Begin, as an `LLMClient`."""
        super().start_weight_update()
        self._stumble("after start")

    def update_weights(self, update_info: Any) -> None:
        """Commit, as an `LLMClient`."""
        super().update_weights(update_info)
        self._stumble("after update")

    def _stumble(self, where: str) -> None:
        if self.failing == where:
            self.failing = ""
            raise ConnectionError(where)


def test_an_update_that_fails_leaves_nothing_half_done(
    llama: Path, new: checkpoints.Tensors
) -> None:
    """Whatever fails, weights, version and the readiness for the next update are whole."""
    with running(llama) as llm:
        before = generate(llm)
        source, client = Tensors(new), Stumbling(llm)
        trainer = trainer_of(client, source, first_version=7)

        source.fails = "model.norm.weight"
        with pytest.raises(ValueError, match="gradient"):
            trainer.send_weights()
        source.fails = None
        source.tensors = {n: t for n, t in new.items() if n != "model.norm.weight"}
        with pytest.raises(IncompleteError):
            trainer.send_weights()
        source.tensors = new
        client.failing = "after start"
        with pytest.raises(ConnectionError):
            trainer.send_weights()
        assert generate(llm) == before
        assert held(trainer) == {Target.VERIFIER: ""}

        # The commit is made, and only the answer lost.
        client.failing = "after update"
        report = trainer.send_weights()
        assert report is not None
        assert report.committed
        assert llm.get_weight_version() == held(trainer)[Target.VERIFIER] == "7"
        trainer.send_weights()
        assert llm.get_weight_version() == "8"
        trainer.shutdown()


def test_only_the_sender_calls_vllm(new: checkpoints.Tensors) -> None:
    """Other ranks of a trainer iterate their source, as a collective wants, and nothing else."""
    source, draft = Tensors(new), Tensors(new)
    trainer = trainer_of(object(), source, rank=1)
    assert trainer.send_weights(draft=draft) is None
    assert trainer.send_draft_weights(draft) is None
    assert source.num_given == len(new)
    assert draft.num_given == 2 * len(new)
    trainer.shutdown()


def test_the_sender_iterates_to_the_end_when_it_fails(
    llama: Path, new: checkpoints.Tensors
) -> None:
    """An update that is refused at its start does not let other ranks wait in a collective."""
    source = Tensors(new)
    with running(llama) as llm:
        trainer = trainer_of(LLMClient(llm), source, workers=[address_of(llm)])
        other = trainer.fleet.update(version="other", holder="another trainer")
        with pytest.raises(TargetBusyError, match="another trainer"):
            trainer.send_weights()
        assert source.num_given == len(new)
        other.abort()
        assert trainer.send_weights() is not None
        trainer.shutdown()


def test_who_can_not_do_something_says_so(new: checkpoints.Tensors) -> None:
    """A client that knows no workers, one without a call for drafts, a trainer without weights."""

    class Bare:
        """What vLLM's own clients have."""

        def init_weight_transfer_engine(self, _init_info: dict[str, Any]) -> None:
            """Do nothing."""

        start_weight_update = update_weights = finish_weight_update = None

    with pytest.raises(InvalidRequestError, match="`workers`"):
        trainer_of(Bare())
    with pytest.raises(EngineUnavailableError):
        trainer_of(Bare(), workers="http://127.0.0.1:1", timeout=0.0)
    trainer = trainer_of(Bare(), workers=["127.0.0.1:1"])
    with pytest.raises(InvalidRequestError, match="source"):
        trainer.send_weights()
    with pytest.raises(InvalidRequestError, match=VllmServer.__name__):
        trainer.send_draft_weights(new.items())
