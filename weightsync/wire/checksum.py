"""Checksums of chunks: of the table of segments and the payload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import crc32c
import xxhash

from weightsync.core.errors import ChecksumMismatchError
from weightsync.core.types import ChecksumType

if TYPE_CHECKING:
    from typing_extensions import Buffer


def checksum(kind: ChecksumType, buffers: Iterable[Buffer]) -> int:
    """Return the checksum of buffers, one after the other, as an unsigned integer.

    Args:
        kind: How to compute it; `NONE` gives 0.
        buffers: C-contiguous memory of any shape and item type.
    """
    if kind is ChecksumType.XXH3_64:
        hasher = xxhash.xxh3_64()
        for buffer in buffers:
            hasher.update(buffer)
        return hasher.intdigest()
    value = 0
    if kind is ChecksumType.CRC32C:
        for buffer in buffers:
            value = crc32c.crc32c(buffer, value)
    return value


def check(kind: ChecksumType, expected: int, buffers: Iterable[Buffer]) -> None:
    """Compare what arrived with the checksum that came with it; `NONE` accepts everything.

    Raises:
        ChecksumMismatchError: it is not what was sent.
    """
    if kind is ChecksumType.NONE:
        return
    actual = checksum(kind, buffers)
    if actual != expected:
        raise ChecksumMismatchError(
            f"the message arrived changed: its {kind.name} is {actual:#x}, "
            f"the message says {expected:#x}; send the message again"
        )
