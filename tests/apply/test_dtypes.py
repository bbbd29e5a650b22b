from __future__ import annotations

import pytest
import torch

from weightsync.apply.dtypes import from_torch, to_torch
from weightsync.core.dtypes import DType
from weightsync.core.errors import UnsupportedError


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_each_type_has_its_counterpart_in_torch(dtype: DType) -> None:
    """B45: one table serves both directions, with torch's own names and sizes."""
    theirs = to_torch(dtype)
    assert from_torch(theirs) is dtype
    assert theirs.itemsize == dtype.itemsize
    assert str(theirs) == f"torch.{dtype}"


def test_a_type_outside_the_contract_is_refused_by_name() -> None:
    """The error names the type and lists the ones that work."""
    with pytest.raises(UnsupportedError, match=r"torch\.complex32.*bfloat16"):
        from_torch(torch.complex32)
