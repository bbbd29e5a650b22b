from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.loader.models import bits, flip_one_bit
from weightsync.loader.compare import BLOCK_BYTES, is_constant, is_plain, same_bytes, view_key

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int8,
    torch.bool,
]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return ones and zeros, which every dtype has."""
    return torch.arange(torch.Size(shape).numel()).remainder(2).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bytes_of_every_dtype(dtype: torch.dtype) -> None:
    """Copies are the same, and differ as soon as one element does."""
    a = values(dtype, 5, 7)
    b = a.clone()
    assert same_bytes(a, b)
    b[4, 6] = 1 - int(a[4, 6].real.item() if dtype.is_complex else a[4, 6].item())
    assert not same_bytes(a, b)


def test_packed_fp4() -> None:
    """Elements of four bits, of which torch compares none itself, are compared by their bytes."""
    raw = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    a = raw.view(torch.float4_e2m1fn_x2)
    assert same_bytes(a, raw.clone().view(torch.float4_e2m1fn_x2))
    assert not same_bytes(a, (raw + 1).view(torch.float4_e2m1fn_x2))


def test_nan_equals_itself_only_by_its_bits() -> None:
    """B46: a NaN of the same bits is the same, one with another payload is not."""
    a = torch.tensor([1.0, float("nan")])
    assert same_bytes(a, a.clone())
    other = a.clone()
    flip_one_bit(other)
    assert other.isnan()[1]
    assert not same_bytes(a, other)


def test_negative_zero_is_not_zero() -> None:
    """Zeros of different sign are equal numbers and different bytes."""
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(8, 5), torch.zeros(10, 4)),
        (torch.zeros(4), torch.zeros(1, 4)),
        (torch.zeros(3, 1), torch.zeros(3, 4)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4), torch.zeros(4, device="meta")),
    ],
)
def test_unlike_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """B12: another shape (even of as many elements), dtype or device is never the same."""
    assert not same_bytes(a, b)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    block_bytes=st.integers(1, 64),
    order=st.randoms(use_true_random=False),
    data=st.data(),
)
def test_every_element_is_looked_at(
    shape: list[int], block_bytes: int, order: Random, data: st.DataObject
) -> None:
    """Whatever shape, strides and block size, one different bit in any place is found."""
    a = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    dims = list(range(len(shape)))
    order.shuffle(dims)
    inverse = [dims.index(dim) for dim in range(len(dims))]
    b = a.permute(dims).contiguous().permute(inverse) if dims else a.clone()
    assert same_bytes(a, b, block_bytes=block_bytes)
    if a.numel():
        index = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        b = b.clone()
        b[index] ^= 1 << data.draw(st.integers(0, 14))
        assert not same_bytes(a, b, block_bytes=block_bytes)


def test_no_block_is_larger_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra memory is bounded: torch never compares more than a block at once."""
    sizes: list[int] = []
    equal = torch.equal

    def noting(a: torch.Tensor, b: torch.Tensor) -> bool:
        sizes.append(a.numel() * a.itemsize)
        return equal(a, b)

    monkeypatch.setattr(torch, "equal", noting)
    a = torch.rand(3, 1000)
    assert same_bytes(a, a.clone(), block_bytes=512)
    assert max(sizes) <= 512
    assert sum(sizes) == a.numel() * a.itemsize


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most bytes that an operation makes; a comparison on a device makes a mask."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        """Run one operation of torch."""
        del types
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if func is torch.ops.aten.equal.default:
            self.largest = max(self.largest, args[0].numel())
        elif isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            if storage.data_ptr() not in given:
                self.largest = max(self.largest, storage.nbytes())
        return made


@pytest.mark.parametrize("form", ["rows", "columns", "one row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_no_mask_of_the_size_of_a_tensor(form: str, dtype: torch.dtype) -> None:
    """Whatever shape, strides and dtype, no operation needs more than a block of extra memory."""
    a = torch.zeros({"rows": (1024, 4096), "columns": (4096, 1024), "one row": (1, 1 << 22)}[form])
    a = (a.t() if form == "columns" else a).to(dtype)
    b = a.clone()
    with Allocations() as seen:
        assert same_bytes(a, b)
    assert 0 < seen.largest <= BLOCK_BYTES < a.numel()


@pytest.mark.gpu
def test_two_device_tensors_need_no_mask() -> None:
    """Comparing 256 MiB on a device takes a few blocks of its memory, not a mask of them."""
    a = torch.zeros(1 << 13, 1 << 13, device="cuda")
    b = a.clone()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert same_bytes(a, b)
    assert torch.cuda.max_memory_allocated() - before < 4 * BLOCK_BYTES


def test_inference_tensors() -> None:
    """B71: tensors made in inference mode are compared outside of it."""
    with torch.inference_mode():
        a = torch.ones(3, 4)
    assert same_bytes(a, torch.ones(3, 4))


def test_view_key() -> None:
    """Two views are one exactly if address, shape, strides and dtype are."""
    a = torch.zeros(4, 4)
    assert view_key(a) == view_key(a.detach())
    assert view_key(a) != view_key(a.t())
    assert view_key(a) != view_key(a[1:])
    assert view_key(a) != view_key(a.clone())
    assert view_key(torch.zeros(0)) != view_key(torch.ones(0))
    assert view_key(torch.zeros(2, device="meta")) != view_key(torch.zeros(2, device="meta"))


def test_is_constant() -> None:
    """One value everywhere is constant, one bit off anywhere is not."""
    a = torch.ones(50, 50)
    assert is_constant(a, block_bytes=64)
    assert is_constant(torch.zeros(()))
    flip_one_bit(a)
    assert not is_constant(a, block_bytes=64)


def test_sparse_is_not_plain() -> None:
    """A sparse tensor has no strided elements to compare."""
    assert not is_plain(torch.eye(3).to_sparse())
    assert is_plain(torch.eye(3).t())
    assert bits(torch.eye(2)) == bits(torch.eye(2).t())
