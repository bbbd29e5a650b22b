"""What holds for tests with a real vLLM: in this process, on the CPU, without a network."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.vllm import checkpoints

pytest.register_assert_rewrite("tests.vllm.proof")

# These tests have an environment of their own: `make test-vllm`.
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]

# Read when vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
# Several ranks may share a core here.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(params=["packed", "plain"])
def weights(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run with weights as vLLM packs them for the CPU, and as they are on other devices."""
    from tests.vllm.plain import plain_weights  # noqa: PLC0415 - only where vLLM is

    with plain_weights() if request.param == "plain" else nullcontext():
        yield request.param


@pytest.fixture
def new() -> checkpoints.Tensors:
    """Return other weights for that Llama."""
    return checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 2)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Llama with seed 1."""
    return checkpoints.write(
        tmp_path_factory.mktemp("llama") / "model",
        checkpoints.LLAMA,
        checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 1),
    )
