"""What vLLM loads in each of its processes: it must be cheap, and must not touch gRPC."""

from __future__ import annotations

import functools
import weakref
from dataclasses import asdict
from typing import Any

from weightsync.integrations.vllm.scheduler import watch_weights
from weightsync.integrations.vllm.version import follow_commits

BACKEND = "weightsync"

# Typed loosely, as importing vLLM's classes for the types would import half of vLLM.
_workers: weakref.WeakSet[Any] = weakref.WeakSet()


def register() -> None:
    """Make the backend known, note workers, let engines follow the weights. Idempotent."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only in vLLM
        WeightTransferEngineFactory,
    )
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415
    from vllm.v1.worker.worker_base import WorkerBase  # noqa: PLC0415

    known = WeightTransferEngineFactory._registry  # noqa: SLF001 - to register twice is an error
    if BACKEND in known:
        return
    WeightTransferEngineFactory.register_engine(
        BACKEND, "weightsync.integrations.vllm.backend", "WeightSyncBackend"
    )
    register_trainer()
    watch_weights(Scheduler, BACKEND)
    follow_commits(EngineCore, BACKEND)
    made = WorkerBase.__init__

    @functools.wraps(made)
    def noted(self: object, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        _workers.add(self)

    WorkerBase.__init__ = noted
    WorkerBase.weightsync_rank = _rank_of


def register_trainer() -> None:
    """Make the trainer's end known. Idempotent."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only with vLLM
        WeightTransferTrainerFactory,
    )

    if BACKEND not in WeightTransferTrainerFactory._registry:  # noqa: SLF001 - as above
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "weightsync.integrations.vllm.trainer", "WeightSyncTrainer"
        )


def _rank_of(worker: Any) -> dict[str, object] | None:  # noqa: ANN401 - see `_workers`
    """Return a `RankFile` as a dict, for `collective_rpc`; None if another backend runs."""
    engine = getattr(worker, "weight_transfer_engine", None)
    place = getattr(engine, "place", None)
    return None if place is None else asdict(place)


def worker_of(model: object) -> Any:  # noqa: ANN401 - see `_workers`
    """Return the worker of this process that has loaded a model.

    Raises:
        LookupError: there is none.
    """
    for worker in tuple(_workers):
        runner: Any = getattr(worker, "model_runner", None)
        if hasattr(runner, "model") and runner.get_model() is model:
            return worker
    raise LookupError("no worker of this process has loaded that model")
