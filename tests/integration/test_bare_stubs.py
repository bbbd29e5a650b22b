from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import weightsync

ROOT = Path(__file__).parents[2]


def run_example(address: str, weights: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Run the example as its docstring says."""
    example = ROOT / "clients" / "examples" / "bare_stubs.py"
    return subprocess.run(
        [sys.executable, example, address, weights, version],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def model() -> torch.nn.Module:
    """Make a model with a tensor of more than one message, an int buffer, a scalar and a hole."""
    model = torch.nn.Sequential(torch.nn.Linear(1200, 1000))
    model.register_buffer("steps", torch.tensor(0))
    model.register_buffer("none", torch.zeros(0, 3))
    return model


def test_a_trainer_on_bare_stubs_updates_a_worker(model: torch.nn.Module, tmp_path: Path) -> None:
    """Ordinary protobuf messages, numpy and a checksum are enough for a whole update."""
    rng = np.random.default_rng(0)
    weights = {
        "0.weight": rng.standard_normal((1000, 1200), dtype=np.float32),
        "0.bias": rng.standard_normal(1000, dtype=np.float32),
        "steps": np.array(7),
        "none": np.zeros((0, 3), np.float32),
    }
    np.savez(tmp_path / "weights.npz", **weights)  # type: ignore[arg-type]
    with weightsync.serve(model) as server:
        done = run_example(server.address, tmp_path / "weights.npz", "step-7")
        assert done.returncode == 0, done.stderr
        assert "step-7 is live" in done.stdout
        (status,) = server.worker.info().targets
        assert status.weight_version == "step-7"
    state = model.state_dict()
    assert {name: state[name].numpy().tobytes() for name in state} == {
        name: array.tobytes() for name, array in weights.items()
    }


def test_an_incomplete_push_is_told_and_changes_nothing(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    """A trainer that forgets a tensor is told which one, and the old weights stay, bit for bit."""
    before = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
    np.savez(tmp_path / "weights.npz", **{"0.bias": np.zeros(1000, np.float32)})  # type: ignore[arg-type]
    with weightsync.serve(model) as server:
        done = run_example(server.address, tmp_path / "weights.npz", "step-8")
    assert done.returncode != 0
    assert "FAILED_PRECONDITION" in done.stderr
    assert "0.weight" in done.stderr
    after = {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}
    assert after == before
