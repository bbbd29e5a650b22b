"""A worker in a process of its own: prints its address, serves until its input ends.

Run as `python -m benchmarks.worker FORM [MAX_SPARE_BYTES]`.
"""

from __future__ import annotations

import sys

import weightsync
from benchmarks.models import make
from weightsync.core.malloc import tune_malloc
from weightsync.core.types import Limits


def main(form: str, max_spare_bytes: str = "0") -> None:
    """Serve a model of a form; keep at most so many bytes of staging memory between sessions."""
    tune_malloc()
    limits = Limits(max_spare_bytes=int(max_spare_bytes))
    with weightsync.serve(make(form), limits=limits) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
