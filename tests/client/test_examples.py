from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "clients" / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch_loop.py", "fsdp2.py"])
def test_an_example_trainer_ends_with_equal_weights(name: str) -> None:
    """Each trainer runs on a CPU as it is, and its worker holds the same bits at the end."""
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "bit for bit: True" in ran.stdout
