"""Arrays that are torch tensors, on any device and with any strides."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from weightsync.core.dtypes import DType
from weightsync.core.errors import UnsupportedError
from weightsync.core.regions import Region
from weightsync_client.shards import Array


class TorchArray:
    """A tensor that is read box by box: only what a message holds is made contiguous or moved."""

    def __init__(self, tensor: torch.Tensor, name: str = "") -> None:
        """Take a strided tensor that has data.

        Raises:
            UnsupportedError: a sparse, quantized or meta tensor, or an element type that the wire
                does not have; `name` is told.
        """
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            what = (
                "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else tensor.layout
            )
            raise UnsupportedError(
                f"tensor {name!r} is {what}: push a dense tensor with data", subjects=[name]
            )
        self._tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            self._tensor = self._tensor.resolve_conj().resolve_neg()
        self._dtype = from_torch(tensor.dtype, name)

    @classmethod
    def from_bytes(cls, data: bytearray, dtype: DType, shape: tuple[int, ...]) -> TorchArray:
        """Look at row-major bytes as a tensor."""
        flat = (
            torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        )
        return cls(flat.view(to_torch(dtype)).reshape(shape))

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return tuple(self._tensor.shape)

    def read(self, box: Region) -> memoryview:
        """Return the row-major bytes of a box; without a copy where it lies in one piece."""
        part = self._tensor if box.sizes == self.shape else self._tensor[box.slices]
        if not (part.is_cpu and part.is_contiguous()):
            part = part.to("cpu").contiguous()
        return _memory(part)

    def cast(self, dtype: DType) -> Array:
        """Return the tensor converted as the worker converts it."""
        return TorchArray(self._tensor.to(to_torch(dtype)))


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, past torch.

    Each call into torch lets go of the interpreter, and waits for it behind the threads of gRPC.
    And torch never resizes a storage again that it has handed to numpy, as trainers do that free
    sharded weights.
    """
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined] # it lives as long as its bytes are used
    return memoryview(memory).cast("B")


def to_torch(dtype: DType) -> torch.dtype:
    """Return torch's type.

    Raises:
        UnsupportedError: this torch does not have it.
    """
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"torch {torch.__version__} has no element type {dtype}")
    return found


@cache
def _from_torch(dtype: torch.dtype) -> DType:
    return DType[str(dtype).removeprefix("torch.").upper()]


def from_torch(dtype: torch.dtype, name: str) -> DType:
    """Return the wire's type.

    Raises:
        UnsupportedError: the wire does not have it; `name` is told.
    """
    try:
        return _from_torch(dtype)
    except KeyError:
        raise UnsupportedError(
            f"tensor {name!r} has the element type {dtype}, which the wire does not have",
            subjects=[name],
        ) from None
