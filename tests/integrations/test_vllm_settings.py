from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.core.errors import InvalidRequestError
from weightsync.integrations.vllm.settings import WorkerSettings


def test_without_settings_there_is_a_free_port() -> None:
    """Nothing needs to be set: each rank listens on a free port of this host."""
    settings = WorkerSettings.read({})
    assert settings.config_of(0).address == "127.0.0.1:0"
    assert settings.directory is None


def test_the_config_of_vllm_is_stronger_than_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are read; where both say something, vLLM's additional_config counts."""
    monkeypatch.setenv("WEIGHTSYNC_VLLM_DIRECTORY", "/from/environment")
    monkeypatch.setenv("WEIGHTSYNC_VLLM_LIMITS__MAX_STREAMS", "3")
    settings = WorkerSettings.read({"weightsync": {"directory": "/from/vllm"}, "other": 1})
    assert settings.directory == Path("/from/vllm")
    assert settings.limits.max_streams == 3


def test_each_rank_has_an_address_of_its_own() -> None:
    """The rank is filled into the address."""
    settings = WorkerSettings.read({"weightsync": {"address": "unix:///run/rank{rank}.sock"}})
    assert [settings.config_of(rank).address for rank in (0, 7)] == [
        "unix:///run/rank0.sock",
        "unix:///run/rank7.sock",
    ]
    settings = WorkerSettings.read({"weightsync": {"address": "0.0.0.0:5005{rank}"}})
    assert settings.config_of(1).address == "0.0.0.0:50051"


@pytest.mark.parametrize(
    ("listens", "advertise", "told"),
    [
        ("127.0.0.1:1", None, "127.0.0.1:1"),
        ("0.0.0.0:1", None, "10.0.0.7:1"),
        ("[::]:1", None, "10.0.0.7:1"),
        ("0.0.0.0:1", "pod-3.workers", "pod-3.workers:1"),
        ("10.0.0.7:1", "fd00::3", "[fd00::3]:1"),
        ("unix:///run/rank0.sock", "pod-3.workers", "unix:///run/rank0.sock"),
    ],
)
def test_others_are_told_an_address_that_they_can_use(
    listens: str, advertise: str | None, told: str
) -> None:
    """A wildcard becomes this host's own address, unless another name is set."""
    settings = WorkerSettings.read({"weightsync": {"advertise_host": advertise}})
    assert settings.advertised(listens, lambda: "10.0.0.7") == told


@pytest.mark.parametrize("given", [{"adress": "127.0.0.1:1"}, {"limits": {"max_streams": 0}}])
def test_a_bad_setting_is_named(given: dict[str, object]) -> None:
    """A key that does not exist, and a value that can't be, are refused by name."""
    with pytest.raises(InvalidRequestError, match=r"adress|max_streams"):
        WorkerSettings.read({"weightsync": given})


def test_no_mapping_is_no_setting() -> None:
    """VLLM's additional_config may be of another kind."""
    assert WorkerSettings.read(None) == WorkerSettings.read({})
