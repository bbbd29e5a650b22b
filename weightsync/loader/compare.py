"""Whether two tensors hold the same bytes, or are the same bytes."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

BLOCK_BYTES = 1 << 20
"""Bytes compared at once. The comparison of two device tensors allocates a mask of that many
elements, so this bounds the extra memory."""

_NUM_SAMPLES = 32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is strided elements, not sparse, quantized or sharded."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not is_traceable_wrapper_subclass(tensor)
    )


def has_content(tensor: torch.Tensor | None) -> bool:
    """Tell whether there are bytes behind it: a tensor on the meta device was never loaded."""
    return tensor is not None and not tensor.is_meta


def view_key(tensor: torch.Tensor) -> Hashable:
    """Return what is equal for two tensors exactly if they are one view of one storage."""
    if tensor.is_meta or not is_plain(tensor) or tensor.numel() == 0:
        return id(tensor)  # without an address, only the object itself is the same
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.untyped_storage().data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def same_bytes(a: torch.Tensor, b: torch.Tensor, *, block_bytes: int = BLOCK_BYTES) -> bool:
    """Tell whether two plain tensors hold the same bytes, element by element in index order.

    NaN equals a NaN of the same bits, -0.0 differs from 0.0. Strides do not matter. A few sampled
    elements come first, then blocks of at most `block_bytes` bytes, until one differs.

    Args:
        a: Any shape, dtype and device.
        b: Tensors of another shape, dtype or device are not the same.
        block_bytes: Bytes compared at once.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if view_key(a) == view_key(b):
        return True
    if a.is_meta:
        return False  # neither has bytes
    return sample(a) == sample(b) and _same_blocks(_bits(a), _bits(b), block_bytes)


def sample(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the bits of a few elements at places that depend on the shape alone."""
    bits = _bits(tensor)
    if bits.numel() == 0 or bits.dim() == 0:
        return tuple(bits.reshape(-1).tolist())
    positions = torch.linspace(
        0, bits.numel() - 1, _NUM_SAMPLES, dtype=torch.float64, device=bits.device
    ).long()
    return tuple(bits[torch.unravel_index(positions, bits.shape)].tolist())


def is_constant(tensor: torch.Tensor, *, block_bytes: int = BLOCK_BYTES) -> bool:
    """Tell whether all elements are one value, as in a norm or a bias that was never trained."""
    if tensor.numel() == 0 or len(set(sample(tensor))) > 1:
        return tensor.numel() == 0
    bits = _bits(tensor)
    first = bits[(0,) * bits.dim()]
    return _same_blocks(bits, first.expand(bits.shape), block_bytes)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements as integers of the same width, whatever the strides."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex128:  # 16 bytes: no integer is as wide
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.itemsize])


def _same_blocks(a: torch.Tensor, b: torch.Tensor, block_bytes: int) -> bool:
    num_bytes = a.numel() * a.itemsize
    if num_bytes <= block_bytes or a.dim() == 0:
        return torch.equal(a, b)
    rows = block_bytes * a.shape[0] // num_bytes
    if rows == 0:  # one row is more than a block
        return all(_same_blocks(x, y, block_bytes) for x, y in zip(a, b, strict=True))
    blocks = zip(torch.split(a, rows), torch.split(b, rows), strict=True)
    return all(torch.equal(x, y) for x, y in blocks)
