"""The weight transfer backend: a service in each worker, and commits in vLLM's own order."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.utils.network_utils import get_ip

from weightsync.core.errors import InvalidRequestError, SessionStateError
from weightsync.core.rankfile import RankFile
from weightsync.core.types import Target
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.integrations.vllm.calls import take_calls
from weightsync.integrations.vllm.collective import commit
from weightsync.integrations.vllm.epoch import Epoch
from weightsync.integrations.vllm.plugin import worker_of
from weightsync.integrations.vllm.settings import CacheAfterCommit, WorkerSettings
from weightsync.integrations.vllm.version import HeldVersion
from weightsync.server.logs import LogFormat, make_logger
from weightsync.server.server import Server
from weightsync.server.worker import Worker

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig, WeightTransferConfig


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing is to be said: the service runs since the model was loaded."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which session to commit.

    Attributes:
        session_id: A session on this worker; empty: the one that holds the target.
    """

    session_id: str = ""


class WeightSyncBackend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Serves one worker of vLLM; made by vLLM when verifier and draft are loaded.

    Weights come over gRPC. `update_weights` commits a session that has them, on all ranks between
    the same two steps.

    Attributes:
        server: What serves the worker.
        place: Where that is.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: nn.Module,
    ) -> None:
        """Start to serve.

        Raises:
            UnsupportedError: a model can't be followed while it loads.
            InvalidRequestError: bad settings, or an address that can't be had.
        """
        super().__init__(config, vllm_config, device, model)
        settings = WorkerSettings.read(vllm_config.additional_config)
        self._worker = worker_of(model)
        self._epoch = Epoch(vllm_config.instance_id)
        reset = settings.cache_after_commit is CacheAfterCommit.RESET
        self._engine = VllmEngine(
            self._worker, self._tell_scheduler if reset else None, share=settings.share
        )
        self._held = HeldVersion(vllm_config.instance_id)
        coordinates = self._engine.coordinates
        worker = Worker(self._engine, limits=settings.limits)
        log = make_logger(LogFormat.HOST, sys.stderr, logging.DEBUG)
        if self._engine.sharing is not None:
            for facts in self._engine.sharing.facts():
                log.info("sharing", **facts)
        self.server = Server(worker, settings.config_of(coordinates.rank), log)
        self._grace = settings.stop_grace
        self.place = RankFile(
            rank=coordinates.rank,
            world_size=coordinates.world_size,
            tp_rank=coordinates.tp_rank,
            pid=os.getpid(),
            address=settings.advertised(self.server.address, get_ip),
            instance_id=worker.instance_id,
        )
        if settings.directory is not None:
            self.place.write(settings.directory)
        worker.trace.add(self._tell_version)
        take_calls(self._worker, self._commit_on_all_ranks)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: the service runs already."""

    def start_weight_update(self) -> None:
        """Do nothing: a session is opened by who has the weights."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Commit a session.

        Raises:
            WeightSyncError: see `collective.commit`.
        """
        self._commit(lambda: update_info)

    def _commit_on_all_ranks(self, update_info: object) -> None:
        self._commit(lambda: self._mine(update_info))

    def _commit(self, read: Callable[[], UpdateInfo]) -> None:
        commit(
            self.server.worker,
            self._engine,
            lambda: read().session_id or self._holder(),
            get_world_group().cpu_group,
        )

    def _mine(self, update_info: object) -> UpdateInfo:
        if isinstance(update_info, list):
            if len(update_info) != self.place.world_size:
                raise InvalidRequestError(
                    f"update_info is for {len(update_info)} ranks, and this vLLM has"
                    f" {self.place.world_size}; give one session for each, in their order",
                    subjects=["update_info"],
                )
            update_info = update_info[self.place.rank]
        parsed: UpdateInfo = self.parse_update_info(cast("dict[str, Any]", update_info))
        return parsed

    def finish_weight_update(self) -> None:
        """Do nothing: a commit is whole, or was taken back."""

    def shutdown(self) -> None:
        """Stop the service; sessions that are open then are dropped."""
        self.server.stop(self._grace)
        self._epoch.remove()
        self._held.remove()

    def _tell_scheduler(self) -> bool:
        # One rank for all: they switch together, and each one's word would cost a reset. Ranks that
        # were launched one by one have a scheduler each.
        parallel = self.parallel_config
        if parallel.rank == 0 or parallel.distributed_executor_backend == "external_launcher":
            self._epoch.advance()
        return True

    def _tell_version(self, step: str, facts: dict[str, object]) -> None:
        if self.parallel_config.rank != 0:
            return
        if step == "commit.completed":
            if str(Target.VERIFIER) in cast("list[str]", facts["targets"]):
                self._held.write(str(facts["weight_version"]))
        elif step == "quarantine" and facts["target"] is Target.VERIFIER:
            self._held.write("")

    def _holder(self) -> str:
        target = Target.VERIFIER if self.model is self._default_model else Target.DRAFT
        for status in self.server.worker.info().targets:
            if status.target is target and status.session_id:
                return str(status.session_id)
        raise SessionStateError(
            f"no session holds the {target}; send its weights before vLLM commits them",
            state="none",
        )
