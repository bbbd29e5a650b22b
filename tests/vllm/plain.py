"""A vLLM on the CPU that leaves weights as they are on other devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import vllm._custom_ops
import vllm.model_executor.layers.utils


@contextmanager
def plain_weights() -> Iterator[None]:
    """Let engines that start within the block not pack linear weights for the CPU."""
    with (
        patch.object(vllm._custom_ops, "_supports_onednn", new=False),
        patch.object(
            vllm.model_executor.layers.utils,
            "check_cpu_sgl_kernel",
            lambda _n, _k, _dtype: False,
        ),
    ):
        yield
