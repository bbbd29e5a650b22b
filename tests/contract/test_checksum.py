from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.core.errors import ChecksumMismatchError
from weightsync.core.types import ChecksumType
from weightsync.wire.checksum import check, checksum

REAL = [kind for kind in ChecksumType if kind is not ChecksumType.NONE]


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        (ChecksumType.XXH3_64, b"", 0x2D06800538D394C2),
        (ChecksumType.CRC32C, b"", 0),
        (ChecksumType.CRC32C, b"123456789", 0xE3069283),
        (ChecksumType.CRC32C, bytes(32), 0x8A9136AA),
        (ChecksumType.NONE, b"123456789", 0),
    ],
)
def test_checksums_have_their_published_values(
    kind: ChecksumType, data: bytes, expected: int
) -> None:
    """Any other implementation of the same checksum agrees."""
    assert checksum(kind, [data]) == expected


@given(parts=st.lists(st.binary(max_size=300)), kind=st.sampled_from(ChecksumType))
def test_pieces_have_the_checksum_of_the_whole(parts: list[bytes], kind: ChecksumType) -> None:
    """How a payload is cut makes no difference."""
    assert checksum(kind, parts) == checksum(kind, [b"".join(parts)])


@pytest.mark.parametrize("kind", REAL)
@given(data=st.binary(min_size=1, max_size=300), bit=st.integers(0))
def test_one_flipped_bit_is_noticed(kind: ChecksumType, data: bytes, bit: int) -> None:
    """A payload that differs in one bit is refused, the right one is taken."""
    expected = checksum(kind, [data])
    check(kind, expected, [memoryview(data)])
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    with pytest.raises(ChecksumMismatchError, match="send the message again"):
        check(kind, expected, [changed])


def test_the_upper_half_of_a_crc_is_zero() -> None:
    """A 32-bit checksum with other upper bits is a wrong one."""
    with pytest.raises(ChecksumMismatchError):
        check(ChecksumType.CRC32C, 0xE3069283 | 1 << 32, [b"123456789"])


def test_without_a_checksum_everything_passes() -> None:
    """A caller who said NONE is not asked for a value."""
    check(ChecksumType.NONE, 7, [b"anything"])
