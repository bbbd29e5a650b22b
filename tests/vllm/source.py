"""What a trainer of vLLM's hands over."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from tests.vllm import checkpoints


class Tensors(WeightSource):  # type: ignore[misc] # untyped where vLLM is not
    """A source of given tensors, which counts what was asked for; `fails` is the one that can't."""

    def __init__(self, tensors: checkpoints.Tensors) -> None:
        self.tensors = tensors
        self.fails: str | None = None
        self.num_given = 0

    def metadata(self) -> list[ParamMeta]:
        """Tell names and shapes."""
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            if name == self.fails:
                raise ValueError("the gradient is gone")
            self.num_given += 1
            yield name, tensor
