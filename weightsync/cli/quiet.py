"""What libraries would say in between."""

from __future__ import annotations

from typing import Any


def quiet_transformers() -> None:
    """Let transformers tell errors only, and show no progress bars of its own."""
    from transformers.utils import logging

    said: Any = logging  # it has no types
    said.set_verbosity_error()
    said.disable_progress_bar()
