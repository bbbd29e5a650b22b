from __future__ import annotations

import re
from pathlib import Path

from google.rpc.code_pb2 import Code

from weightsync.core.dtypes import DType
from weightsync.core.errors import Reason, WeightSyncError
from weightsync.core.regions import Region
from weightsync.core.types import ChecksumType, Segment, SessionState, Target, TargetState
from weightsync.wire.chunk import serialize_chunk
from weightsync.wire.status import CODES

PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()


def test_the_page_lists_every_error() -> None:
    """The table of errors has each reason with its status code and its class, in order."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| [^|]+ \| `(\w+)` \|$", PAGE, re.MULTILINE)
    assert rows == [
        (reason.name, Code.Name(CODES[reason]), WeightSyncError.class_for(reason).__name__)
        for reason in Reason
    ]


def test_the_page_names_every_state() -> None:
    """Each state of a session and of a target is on the page."""
    for state in (*SessionState, *TargetState):
        assert re.search(rf"\b{state.name}\b", PAGE), state


def test_the_message_on_the_page_is_a_real_one() -> None:
    """The chunk that is shown byte for byte is what its description says."""
    (block,) = re.findall(r"```text\n(0a 02 .*?)```", PAGE, re.DOTALL)
    told = "".join(re.split(r" {4,}", line.strip())[0] for line in block.splitlines())
    segments = [
        Segment(Target.VERIFIER, "a", DType.BFLOAT16, (2,), Region.whole((2,)), 0, 4),
        Segment(Target.DRAFT, "b.w", DType.INT8, (300, 4), Region((299, 1), (1, 2)), 1, 1),
    ]
    data = serialize_chunk("s1", segments, [b"\1\2\3\4", b"\xff"], ChecksumType.CRC32C)
    assert bytes.fromhex(told) == data
