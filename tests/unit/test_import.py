"""What importing the package brings along."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, weightsync
print(*sorted({"google.protobuf", "grpc", "numpy", "torch"} & set(sys.modules)))
"""


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Importing `weightsync` imports none of torch, grpc, protobuf and numpy."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == []
