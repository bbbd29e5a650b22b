"""Between torch's element types and the contract's."""

from __future__ import annotations

import torch

from weightsync.core.dtypes import DType
from weightsync.core.errors import UnsupportedError

# By name, since the youngest kinds are missing in older versions of torch.
_TORCH: dict[DType, torch.dtype] = {
    dtype: getattr(torch, str(dtype)) for dtype in DType if hasattr(torch, str(dtype))
}
_CORE = {theirs: ours for ours, theirs in _TORCH.items()}


def to_torch(dtype: DType) -> torch.dtype:
    """Return torch's type.

    Raises:
        UnsupportedError: this version of torch does not have it.
    """
    try:
        return _TORCH[dtype]
    except KeyError:
        raise UnsupportedError(
            f"torch {torch.__version__} has no {dtype}; send another type or use a newer torch"
        ) from None


def from_torch(dtype: torch.dtype) -> DType:
    """Return the contract's type.

    Raises:
        UnsupportedError: the contract has no such type, e.g. for quantized ones.
    """
    try:
        return _CORE[dtype]
    except KeyError:
        raise UnsupportedError(
            f"tensors of {dtype} can't be updated; the types that can: "
            + ", ".join(str(d) for d in _TORCH)
        ) from None
