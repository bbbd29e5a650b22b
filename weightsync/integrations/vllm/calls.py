"""VLLM's calls of a weight update, on one of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_STARTS = ("start_weight_update", "start_draft_weight_update")


def take_calls(worker: Any, commit: Callable[[object], None]) -> None:  # noqa: ANN401 - any device
    """Let no caller of a worker's weight update leave it in a state that refuses the next one.

    A commit is one call, `update_weights`, so that to start and to finish are words only. A caller
    that vanished in between is forgotten by the next start.

    vLLM reads the answers of its ranks up to the first error, and takes what it has not read for
    answers to its next call. So the last rank tells of an error, which all of them must have.

    Args:
        worker: vLLM's; its methods are replaced on this object.
        commit: Takes what `update_weights` was given; if it raises, it raises on all ranks.
    """
    config = worker.parallel_config
    # With `external_launcher` each rank has a vLLM of its own, which reads that rank's answer only.
    alone = config.distributed_executor_backend == "external_launcher"
    tells = alone or worker.rank + 1 == config.world_size

    def replace(name: str, around: Callable[..., None]) -> None:
        inner = getattr(worker, name)

        def told_once(*args: object, **kwargs: object) -> None:
            try:
                around(inner, *args, **kwargs)
            except Exception:
                if tells:
                    raise

        setattr(worker, name, told_once)

    def start(inner: Callable[[], None]) -> None:
        worker._weight_update_active = False  # noqa: SLF001 - the name that vLLM gave it
        worker.weight_transfer_engine.reset_weight_update_target()
        inner()

    def update(_inner: object, update_info: object) -> None:
        commit(update_info)

    def finish(inner: Callable[[], None]) -> None:
        worker._weight_update_active = True  # noqa: SLF001
        inner()

    def release(_inner: object) -> None:
        """Keep the service, which is no trainer's connection."""

    for name in _STARTS:
        replace(name, start)
    replace("update_weights", update)
    replace("finish_weight_update", finish)
    replace("shutdown_weight_transfer_engine", release)
    replace("init_weight_transfer_engine", lambda inner, init_info: inner(init_info))
