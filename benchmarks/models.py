"""The models that are pushed: bfloat16 parameters of given forms, with nothing to compute."""

from __future__ import annotations

import torch
from torch import nn

_MIXED = (
    (12, (8192, 4096)),
    (8, (2048, 4096)),
    (60, (1024, 1024)),
    (60, (256, 256)),
    (60, (2048,)),
)

FORMS: dict[str, tuple[tuple[int, tuple[int, ...]], ...]] = {
    # 1 GiB in 200 tensors of 4 KiB to 64 MiB.
    "mixed": _MIXED,
    # 78 MiB in pieces of 4 KiB, and the same bytes in few pieces.
    "small": ((20_000, (2048,)),),
    "few": ((200, (100, 2048)),),
}
"""Of each model: how many parameters have which shape."""


def make(form: str) -> nn.Module:
    """Return a model of one of the forms; every page of it is in memory."""
    shapes = [shape for count, shape in FORMS[form] for _ in range(count)]
    return nn.ParameterDict(
        {f"weight_{index:05}": torch.ones(shape).bfloat16() for index, shape in enumerate(shapes)}
    ).requires_grad_(requires_grad=False)


def nbytes(module: nn.Module) -> int:
    """Return the bytes of all parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())
