"""The staged bytes of one storage, and which of them have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from weightsync.arena.arena import Bytes
from weightsync.core.coverage import Coverage
from weightsync.core.dtypes import DType
from weightsync.core.regions import Region
from weightsync.layout.shares import ParameterKey


def in_bytes(box: Region, dtype: DType) -> Region:
    """Return a box of elements as a box of bytes: one dimension more, inside the element."""
    return Region((*box.offsets, 0), (*box.sizes, dtype.itemsize))


def in_elements(boxes: Iterable[Region], itemsize: int) -> list[Region]:
    """Return the elements of which boxes of bytes hold a part, as disjoint boxes."""
    boxes = list(boxes)
    if all(box.sizes[-1] == itemsize for box in boxes):
        # Nearly always: no element is there in part.
        return [Region(box.offsets[:-1], box.sizes[:-1]) for box in boxes]
    return list(Coverage(Region(box.offsets[:-1], box.sizes[:-1]) for box in boxes).boxes)


@dataclass(eq=False, slots=True)
class Block:
    """Memory for one storage of a session.

    Attributes:
        key: The parameter that stands for the storage.
        dtype: Element type.
        memory: uint8 of shape (*parameter shape, itemsize); the last dimension is contiguous.
        needed: Elements that a FULL session must bring, as disjoint boxes; empty if none.
        foreign: True for storage of the verifier that a draft session writes: it is compared, or
            becomes the draft's own, and is never required.
        coverage: Bytes that have arrived; replaced, never changed.
    """

    key: ParameterKey
    dtype: DType
    memory: Bytes
    needed: tuple[Region, ...]
    foreign: bool
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def whole(self) -> Region:
        """All of it, as a box of bytes."""
        return Region.whole(self.memory.shape)

    def missing(self, box: Region) -> list[Region]:
        """Return the elements of a box of which a byte is missing, as disjoint boxes."""
        return in_elements(self.coverage.missing(in_bytes(box, self.dtype)), self.dtype.itemsize)

    def written(self) -> Iterator[tuple[Region, Bytes]]:
        """Yield the disjoint boxes of elements that have arrived, with their bytes."""
        if self.coverage.numel == self.memory.size:
            # Nearly always: nothing is to be counted together.
            yield Region.whole(self.memory.shape[:-1]), self.memory
            return
        for box in in_elements(self.coverage.boxes, self.dtype.itemsize):
            yield box, self.memory[box.slices]
