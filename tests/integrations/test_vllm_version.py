from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.integrations.vllm.version import HeldVersion, follow_commits


@pytest.fixture(autouse=True)
def own_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files of engines in a directory of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def core(backend: str | None = "weightsync") -> Any:
    """Return what is needed of vLLM's engine, as its plugins have left the class."""

    class Core:
        def __init__(self) -> None:
            transfer = None if backend is None else SimpleNamespace(backend=backend)
            self.vllm_config = SimpleNamespace(weight_transfer_config=transfer, instance_id="abc")
            self._weight_version = "default"

    follow_commits(Core, "weightsync")
    return Core()


def test_the_version_of_a_commit_is_told() -> None:
    """Before the first commit it is vLLM's own; then that of the last commit, whoever made it."""
    made, held = core(), HeldVersion("abc")
    assert made._weight_version == "default"
    made._weight_version = "step-0"
    assert made._weight_version == "step-0"
    for version in ("step-1", "step-2"):
        held.write(version)
        assert made._weight_version == version


def test_another_version_than_that_of_the_commit_is_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """VLLM can't be told that its weights are what they are not; the log says so."""
    made = core()
    HeldVersion("abc").write("step-1")
    made._weight_version = "step-1"
    assert not caplog.records
    made._weight_version = "step-9"
    assert made._weight_version == "step-1"
    assert "'step-9'" in caplog.text


def test_weights_that_are_lost_have_no_version() -> None:
    """Until vLLM says what it has loaded itself, or the next commit."""
    made, held = core(), HeldVersion("abc")
    held.write("step-1")
    held.write("")
    assert made._weight_version == ""
    made._weight_version = "from disk"
    assert made._weight_version == "from disk"
    held.write("step-2")
    assert made._weight_version == "step-2"


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_engines_with_another_backend_are_left_alone(backend: str | None) -> None:
    """They tell what they were told."""
    made = core(backend)
    HeldVersion("abc").write("step-1")
    made._weight_version = "other"
    assert made._weight_version == "other"


def test_a_file_goes_with_its_engine() -> None:
    """Nothing stays behind; to remove it again is harmless."""
    held = HeldVersion("abc")
    held.write("step-1")
    assert held.read() == "step-1"
    held.remove()
    held.remove()
    assert held.read() is None
