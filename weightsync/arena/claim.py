"""What a message is about to copy, and into how many boxes it may cut a session's bytes.

A few rows that cross a few columns are very many boxes, each of which would have to be compared,
listed and committed by itself. So their number is limited, and so is the work for one message.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.arena.block import Block
from weightsync.arena.scatter import Copy
from weightsync.core.coverage import Coverage
from weightsync.core.errors import InvalidRequestError
from weightsync.core.regions import Region

MAX_BOXES = 1 << 13
"""Most disjoint boxes in which the bytes of one storage may lie."""

MAX_SESSION_BOXES = 1 << 17
"""Most of them over all storages of a session, the first of each not counted."""

MAX_STEPS = 1 << 18
"""Most boxes that are looked at for one message; takes well under a second."""


class Claim:
    """The copies of one message, from the moment when nobody else may copy there.

    Attributes:
        copies: What is to be copied.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        """Collect what is going to be claimed.

        Raises:
            InvalidRequestError: it is cut too finely.
        """
        self.copies = copies
        self._steps = 0
        self._boxes: dict[Block, Coverage] = {}
        self._found: dict[Block, Coverage] = {}
        self._filled: dict[Block, Coverage] = {}
        for copy in copies:
            mine = self._boxes.setdefault(copy.block, Coverage())
            self._look(copy, mine)
            mine.add(copy.box)

    def meets(self, other: Claim) -> bool:
        """Tell whether another message copies to where this one does."""
        for copy in self.copies:
            theirs = other._boxes.get(copy.block)
            if theirs is not None:
                self._look(copy, theirs)
                if theirs.overlaps(copy.box):
                    return True
        return False

    def compare(self) -> None:
        """Find out what is there already of what is to be copied.

        Raises:
            InvalidRequestError: it is cut too finely.
        """
        for copy in self.copies:
            block = copy.block
            filled = self._filled.get(block)
            if filled is None:
                self._found[block] = block.coverage
                filled = self._filled[block] = block.coverage.copy()
            self._look(copy, filled)
            copy.known = filled.overlaps(copy.box)
            self._count(copy, len(copy.known))
            filled.add(copy.box)
            _check_boxes(copy.block, filled)

    def settle(self) -> tuple[int, int]:
        """Note that all was copied.

        Returns:
            How many boxes there are more than before, and bytes of what is needed.

        Raises:
            InvalidRequestError: together with another message it is cut too finely; nothing of
                this one counts.
        """
        for block, found in self._found.items():
            if block.coverage is not found:
                merged = block.coverage.copy()
                for copy in self.copies:
                    if copy.block is block:
                        merged.add(copy.box)
                _check_boxes(block, merged)
                self._filled[block] = merged
        boxes = needed = 0
        for block, filled in self._filled.items():
            boxes += max(1, filled.num_boxes) - max(1, block.coverage.num_boxes)
            needed += filled.numel - block.coverage.numel if block.needed else 0
            block.coverage = filled
        return boxes, needed

    def _look(self, copy: Copy, among: Coverage) -> None:
        self._count(copy, among.steps(copy.box))

    def _count(self, copy: Copy, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _too_fine(copy.block, copy.box, f"this message touches more than {MAX_STEPS}")


def check_session(copies: Sequence[Copy], num_boxes: int) -> None:
    """Refuse another message while a session lies in too many boxes.

    Raises:
        InvalidRequestError: it does.
    """
    if num_boxes > MAX_SESSION_BOXES and copies:
        text = f"the session's bytes lie in more than {MAX_SESSION_BOXES}"
        raise _too_fine(copies[0].block, copies[0].box, text)


def _check_boxes(block: Block, filled: Coverage) -> None:
    if filled.num_boxes > MAX_BOXES:
        raise _too_fine(block, block.whole, f"it would lie in more than {MAX_BOXES}")


def _too_fine(block: Block, box: Region, text: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"bytes of {block.key} at {box} are cut too finely: {text} boxes; send larger regions,"
        " in the order in which they lie",
        subjects=["segments.region"],
    )
