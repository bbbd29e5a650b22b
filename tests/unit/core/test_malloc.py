"""The allocator's settings for messages of megabytes."""

from __future__ import annotations

import subprocess
import sys

_FAULTS = """
import resource, sys
from weightsync.core.malloc import tune_malloc
if sys.argv[1:]:
    assert tune_malloc()
def churn(times):
    for _ in range(times):
        messages = [bytearray(4 << 20) for _ in range(4)]
churn(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(*arguments: str) -> int:
    program = [sys.executable, "-c", _FAULTS, *arguments]
    return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)


def test_memory_of_messages_is_used_again() -> None:
    """Once tuned, messages of 4 MiB come and go without a page fault for each of their pages."""
    assert _faults("tuned") * 10 < _faults()
