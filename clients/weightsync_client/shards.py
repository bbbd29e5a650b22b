"""What a source gives: named arrays, or boxes of them, whose bytes are read when they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from weightsync.core.dtypes import DType
from weightsync.core.errors import OutOfBoundsError
from weightsync.core.regions import Region

BLOCK_BYTES = 4 << 20
"""How much of an array is read at once where no message says how much."""


class Array(Protocol):
    """Elements in memory or in a file, on any device and with any strides."""

    @property
    def dtype(self) -> DType:
        """Element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension, in elements."""

    def read(self, box: Region) -> memoryview:
        """Return the row-major bytes of a box that is not empty.

        The memory may be the array's own, so it is valid while the array is unchanged.
        """

    def cast(self, dtype: DType) -> Array:
        """Return the array converted to another element type.

        Raises:
            UnsupportedError: nothing here can convert between the two types.
        """


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a named tensor.

    Attributes:
        name: The sender's name of the tensor.
        array: The elements of `region`.
        shape: Global shape of the tensor.
        region: The part that `array` holds, in elements of the tensor.
    """

    name: str
    array: Array
    shape: tuple[int, ...]
    region: Region

    def __post_init__(self) -> None:
        """Check that the box lies in the tensor and has the array's shape."""
        if not self.region.fits(self.shape) or self.region.sizes != self.array.shape:
            raise OutOfBoundsError(
                f"tensor {self.name!r}: an array of shape {self.array.shape} does not fill the "
                f"region {self.region} of a tensor of shape {self.shape}",
                subjects=[self.name],
            )

    @classmethod
    def whole(cls, name: str, array: Array) -> Shard:
        """Return the shard that is a whole tensor."""
        return cls(name, array, array.shape, Region.whole(array.shape))


def pieces(array: Array, box: Region, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """Yield the row-major bytes of a box, at most `block_bytes` at a time."""
    step = max(1, block_bytes // array.dtype.itemsize)
    for start in range(0, box.numel, step):
        for run in box.runs(start, min(step, box.numel - start)):
            yield array.read(run)


def digest(array: Array, box: Region) -> bytes:
    """Return the XXH3-128 of a box's row-major bytes, 16 bytes, as `VerifyWeights` gives it."""
    hasher = xxhash.xxh3_128()
    for piece in pieces(array, box):
        hasher.update(piece)
    return hasher.digest()
