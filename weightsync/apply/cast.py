"""Conversion of staged elements, for sessions that allow it."""

from __future__ import annotations

import numpy as np
import torch

from weightsync.apply.dtypes import to_torch
from weightsync.arena.arena import Bytes
from weightsync.core.dtypes import DType


def cast(data: Bytes, source: DType, target: DType) -> Bytes:
    """Convert elements as `Tensor.to` does; which casts are sensible is checked by the caller.

    Args:
        data: The bytes of whole elements, 1-D.
        source: Their type.
        target: What they become.

    Returns:
        The bytes of as many elements, 1-D.
    """
    # A copy: the payload is read-only, which torch warns of, and may be unaligned.
    elements = torch.from_numpy(data.copy()).view(to_torch(source))
    out = elements.to(to_torch(target)).view(torch.uint8).numpy()
    return np.asarray(out, np.uint8)
