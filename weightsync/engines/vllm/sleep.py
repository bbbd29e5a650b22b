"""Telling of the sleep of a vLLM worker, which vLLM begins and ends by itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from weightsync.engines.base import WEIGHTS, SleepWatcher

CALLS = "vLLM's own sleep(level) and wake_up(tags), whose scheduler must know (/sleep and /wake_up)"

_DROP = 2


def watch_sleep(worker: Any, watcher: SleepWatcher) -> None:  # noqa: ANN401 - of any device
    """Let a watcher know before a worker frees the memory of its weights, and before it is back."""
    sleep, wake_up = worker.sleep, worker.wake_up

    def falling_asleep(level: int = 1) -> None:
        # Without its sleep mode, as always on the CPU, vLLM stops to schedule and frees nothing.
        frees = worker.vllm_config.model_config.enable_sleep_mode
        with watcher.falling_asleep(drops=frees and level == _DROP):
            sleep(level)

    def waking(tags: Sequence[str] | None = None) -> None:
        back = tags is None or WEIGHTS in tags
        with watcher.waking() if back else nullcontext():
            wake_up(tags)

    worker.sleep, worker.wake_up = falling_asleep, waking
