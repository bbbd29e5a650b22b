"""What holds for all tests: one thread per process, no network, reproducible examples."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

# Read when transformers is imported: models come from the tests themselves or from a package.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# The pure parts are tested where torch is not installed.
HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch

    torch.set_num_threads(1)

# No deadline: how long an example takes depends on the machine, not on the code.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips the tests marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") and not (HAS_TORCH and torch.cuda.is_available()):
        pytest.skip("no CUDA device")
