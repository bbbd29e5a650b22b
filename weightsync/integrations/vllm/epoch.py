"""The number of the weights, which a worker counts up and vLLM's scheduler reads elsewhere."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path


def engine_file(instance_id: str, suffix: str) -> Path:
    """Return the path of a file by which processes of one engine, on one host, tell each other."""
    return (
        Path(tempfile.gettempdir()) / f"weightsync-{os.getuid()}" / f"vllm-{instance_id}.{suffix}"
    )


class Epoch:
    """A file on this host whose time stamp is the number.

    Both processes know the engine's `instance_id`, and nothing else of each other. To read the
    number takes one call of the system.
    """

    def __init__(self, instance_id: str) -> None:
        """Name the file of an engine; it need not exist."""
        self._path = engine_file(instance_id, "epoch")

    def advance(self) -> None:
        """Tell that the weights are others now."""
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._path.touch(mode=0o600)
        # Explicitly: the system's own stamps are coarser than two commits may be close.
        now = time.time_ns()
        os.utime(self._path, ns=(now, now))

    def read(self) -> int:
        """Return the number; 0 before the first change."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def remove(self) -> None:
        """Take the file away, when the engine stops."""
        self._path.unlink(missing_ok=True)
