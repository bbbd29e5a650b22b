"""What vLLM keeps of one request for others, and must not keep across a change of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def outlive_requests(config: VllmConfig) -> bool:
    """Tell whether there are prefixes, or encoded images and the like, that other requests use."""
    caching: bool = config.cache_config.enable_prefix_caching
    return caching or bool(config.model_config.is_multimodal_model)
