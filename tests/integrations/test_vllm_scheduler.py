from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.integrations.vllm.epoch import Epoch
from weightsync.integrations.vllm.scheduler import watch_weights


@pytest.fixture(autouse=True)
def own_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files of engines in a directory of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


class Plain:
    """What is needed of vLLM's scheduler."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.log: list[str] = []
        self.encoder_cache_manager = SimpleNamespace(cached={"new": {1}}, freed=["old"])

    def schedule(self) -> str:
        """Plan a step."""
        self.log.append("schedule")
        return "step"

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        """Drop the prefixes."""
        assert reset_running_requests
        self.log.append("reset")
        if self.vllm_config.broken:
            raise RuntimeError("waiting for remote memory")
        return True

    def reset_encoder_cache(self) -> None:
        """Forget what was encoded."""
        self.encoder_cache_manager.cached.clear()
        self.encoder_cache_manager.freed.clear()


def config(**other: Any) -> Any:
    """Return what the scheduler knows of its engine."""
    given: dict[str, Any] = {
        "instance_id": "abc",
        "broken": False,
        "weight_transfer_config": SimpleNamespace(backend="weightsync"),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "model_config": SimpleNamespace(is_multimodal_model=False),
        "additional_config": {},
    }
    return SimpleNamespace(**(given | other))


def scheduler(**other: Any) -> Plain:
    """Return a scheduler of a derived class, as vLLM has some."""

    class Watched(Plain):
        pass

    class Derived(Watched):
        pass

    watch_weights(Watched, "weightsync")
    return Derived(config(**other))


def test_each_change_resets_the_cache_once() -> None:
    """The first step after a commit begins with a reset, the others do not."""
    made, epoch = scheduler(), Epoch("abc")
    assert made.schedule() == "step"
    epoch.advance()
    made.schedule()
    made.schedule()
    epoch.advance()
    epoch.advance()
    made.schedule()
    expected = ["schedule", "reset", "schedule", "schedule", "reset", "schedule"]
    assert made.log == expected


def test_what_old_weights_have_encoded_is_dropped() -> None:
    """No request finds an old image; workers are told with the next step to drop it, too."""
    made = scheduler(
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        model_config=SimpleNamespace(is_multimodal_model=True),
    )
    Epoch("abc").advance()
    made.schedule()
    assert not made.encoder_cache_manager.cached
    assert made.encoder_cache_manager.freed == ["old", "new"]


def test_changes_before_the_start_do_not_count() -> None:
    """A number that an engine of the same name has left behind resets nothing."""
    Epoch("abc").advance()
    made = scheduler()
    made.schedule()
    assert made.log == ["schedule"]


@pytest.mark.parametrize(
    "other",
    [
        {"weight_transfer_config": None},
        {"weight_transfer_config": SimpleNamespace(backend="nccl")},
        {"cache_config": SimpleNamespace(enable_prefix_caching=False)},
        {"additional_config": {"weightsync": {"cache_after_commit": "keep"}}},
    ],
)
def test_other_engines_are_left_alone(other: dict[str, Any]) -> None:
    """Without the backend, without a cache, and where the caller resets, nothing is watched."""
    made = scheduler(**other)
    Epoch("abc").advance()
    made.schedule()
    assert made.log == ["schedule"]


def test_a_reset_that_can_not_be_does_not_stop_the_engine() -> None:
    """The step is planned all the same."""
    made = scheduler(broken=True)
    Epoch("abc").advance()
    assert made.schedule() == "step"


def test_an_epoch_is_removed_with_its_engine() -> None:
    """Nothing stays behind; to remove it again is harmless."""
    epoch = Epoch("abc")
    epoch.advance()
    epoch.remove()
    epoch.remove()
    assert epoch.read() == 0
