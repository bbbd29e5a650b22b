"""Tensors as bits: views under which no copy or comparison looks at values."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.arena.arena import Bytes

PIECE_BYTES = 1 << 20
"""Largest piece that is moved at once: it stays in a core's cache, and it bounds extra memory."""

# 16-byte elements have no integer type; complex128 is moved as bits all the same.
_TORCH = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
_NUMPY = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of equal shape with an integer type of equal size, without gradient."""
    return tensor.detach().view(_TORCH[tensor.element_size()])


def staged_bits(memory: Bytes) -> torch.Tensor:
    """Return staged bytes, uint8 of shape (*sizes, itemsize), as a tensor like `bits`, no copy."""
    return torch.from_numpy(memory.view(_NUMPY[memory.shape[-1]])[..., 0])


class _Memory:
    """A CPU tensor's memory, in the form that numpy takes from others; keeps the tensor alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        itemsize = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": np.dtype(_NUMPY[itemsize]).str,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * itemsize for step in tensor.stride()),
        }


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a CPU tensor that `bits` made as an array, no copy.

    Not through `Tensor.numpy`: torch never resizes a storage again that it has handed to numpy,
    so that an engine could not free its weights' memory after the first commit.
    """
    return np.asarray(_Memory(tensor)) if tensor.numel() else tensor.numpy()


def plain_memory(tensor: torch.Tensor) -> Bytes:
    """Return a contiguous CPU tensor's bytes in a row, no copy; faster than `as_array`.

    The array keeps the tensor alive.
    """
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8)


def live_memory(tensor: torch.Tensor) -> Bytes:
    """Return a CPU tensor as uint8 of shape (*shape, itemsize), no copy, whatever its strides."""
    array = as_array(bits(tensor))
    first = array if array.ndim == 0 else array[tuple(slice(0, 1) for _ in array.shape)]
    first = first.reshape(-1).view(np.uint8)
    return np.lib.stride_tricks.as_strided(
        first, (*array.shape, array.itemsize), (*array.strides, 1)
    )


def storage_identity(tensor: torch.Tensor) -> Hashable:
    """Return what tells storages apart: equal for views of equal form on equal memory.

    Empty tensors have no memory: each object is its own.
    """
    if tensor.numel() == 0:
        return (id(tensor),)
    return (
        str(tensor.device),
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        str(tensor.dtype),
    )


def pieces(
    tensor: torch.Tensor, other: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of two tensors of equal shape, piece by piece, in row-major order.

    A piece has at most `PIECE_BYTES`, or is one element.
    """
    if tensor.numel() == 0:
        return
    if tensor.numel() * tensor.element_size() <= PIECE_BYTES:
        yield tensor, other
        return
    if tensor.is_contiguous() and other.is_contiguous():
        tensor, other = tensor.view(-1), other.view(-1)
    rows = max(1, PIECE_BYTES * tensor.shape[0] // (tensor.numel() * tensor.element_size()))
    if rows == 1 and tensor.ndim > 1:
        for one, two in zip(tensor, other, strict=True):
            yield from pieces(one, two)
        return
    for start in range(0, tensor.shape[0], rows):
        stop = start + rows
        yield tensor[start:stop], other[start:stop]
