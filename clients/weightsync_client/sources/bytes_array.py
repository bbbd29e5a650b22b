"""Arrays that are plain bytes in host memory: numpy arrays, and files mapped into memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.core.dtypes import DType
from weightsync.core.errors import UnsupportedError
from weightsync.core.regions import Region
from weightsync_client.shards import Array


class BytesArray:
    """An array whose elements are opaque items of bytes."""

    def __init__(self, items: npt.NDArray[np.void], dtype: DType) -> None:
        """Take items of `dtype.itemsize` bytes, little-endian, with any strides."""
        self._items = items
        self._dtype = dtype

    @classmethod
    def from_buffer(cls, buffer: memoryview, dtype: DType, shape: tuple[int, ...]) -> BytesArray:
        """Look at row-major bytes as an array; nothing is copied."""
        kind = f"V{dtype.itemsize}"
        # numpy refuses to look at an empty buffer.
        items = np.frombuffer(buffer, dtype=kind) if buffer.nbytes else np.empty(0, dtype=kind)
        return cls(items.reshape(shape), dtype)

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any], name: str) -> BytesArray:
        """Look at a numpy array, types of `ml_dtypes` (JAX) included.

        Raises:
            UnsupportedError: there is no such element type on the wire; `name` is told.
        """
        dtype = _dtype(array.dtype, name)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        # A view of opaque items works for any strides, but not for numpy's object types.
        return cls(array.view(f"V{dtype.itemsize}"), dtype)

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return self._items.shape

    def read(self, box: Region) -> memoryview:
        """Return the row-major bytes of a box; without a copy where it lies in one piece."""
        part = np.ascontiguousarray(self._items[box.slices])
        return part.reshape(-1).view(np.uint8).data

    def cast(self, dtype: DType) -> Array:
        """Return the array converted to another element type, by torch."""
        try:
            from weightsync_client.sources.torch_array import TorchArray  # noqa: PLC0415
        except ImportError:
            raise UnsupportedError(
                f"a conversion from {self.dtype} to {dtype} needs torch: install weightsync[torch]"
            ) from None
        whole = self.read(Region.whole(self.shape)) if self._items.size else memoryview(b"")
        return TorchArray.from_bytes(bytearray(whole), self.dtype, self.shape).cast(dtype)


def _dtype(dtype: np.dtype[Any], name: str) -> DType:
    try:
        return DType[dtype.name.upper()]
    except KeyError:
        raise UnsupportedError(
            f"tensor {name!r} has the element type {dtype}, which the wire does not have; "
            f"convert it, or pack it into bytes",
            subjects=[name],
        ) from None
