from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from weightsync.engines.vllm.sleep import watch_sleep


class Worker:
    """What the watching needs of a worker of vLLM; it notes what it does."""

    def __init__(self, seen: list[str], *, sleep_mode: bool) -> None:
        model_config = SimpleNamespace(enable_sleep_mode=sleep_mode)
        self.vllm_config = SimpleNamespace(model_config=model_config)
        self._seen = seen

    def sleep(self, level: int = 1) -> None:
        """Free the memory."""
        self._seen.append(f"sleep {level}")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring it back."""
        self._seen.append(f"wake {tags}")


class Watcher:
    """Notes what it is told, before and behind."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    @contextmanager
    def falling_asleep(self, *, drops: bool) -> Iterator[None]:
        """Note it."""
        self._seen.append("drops" if drops else "keeps")
        yield
        self._seen.append("asleep")

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Note it."""
        self._seen.append("waking")
        yield
        self._seen.append("awake")


@pytest.mark.parametrize(
    ("sleep_mode", "level", "drops"),
    [(True, 1, "keeps"), (True, 2, "drops"), (False, 1, "keeps"), (False, 2, "keeps")],
)
def test_weights_are_lost_at_level_2_in_sleep_mode(
    sleep_mode: bool, level: int, drops: str
) -> None:
    """Only a vLLM with its sleep mode frees memory; the watcher knows before and behind it."""
    seen: list[str] = []
    worker = Worker(seen, sleep_mode=sleep_mode)
    watch_sleep(worker, Watcher(seen))
    worker.sleep(level=level)
    assert seen == [drops, f"sleep {level}", "asleep"]


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache", "weights"]])
def test_targets_wake_with_their_weights(tags: list[str] | None) -> None:
    """A wake of the weights, or of all, is told."""
    seen: list[str] = []
    worker = Worker(seen, sleep_mode=True)
    watch_sleep(worker, Watcher(seen))
    worker.wake_up(tags=tags)
    assert seen == ["waking", f"wake {tags}", "awake"]


def test_targets_sleep_on_without_their_weights() -> None:
    """A wake of other memory alone is none of the watcher's business."""
    seen: list[str] = []
    worker = Worker(seen, sleep_mode=True)
    watch_sleep(worker, Watcher(seen))
    worker.wake_up(tags=["kv_cache"])
    assert seen == ["wake ['kv_cache']"]
