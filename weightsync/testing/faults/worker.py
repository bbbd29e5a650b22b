"""A worker in a process of its own: serves a pair under a forward loop, and obeys its parent.

SIGTERM stops it as it stops `weightsync serve`; it then tells its last state.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import weightsync
from weightsync.core.trace import Trace
from weightsync.server.server import Server
from weightsync.testing.failpoints import FullArena
from weightsync.testing.faults.armed import Armed
from weightsync.testing.faults.loop import Loop
from weightsync.testing.faults.net import Net, are_shared, live_weights, make_pair
from weightsync.testing.faults.talk import obey, tell
from weightsync.testing.faults.weights import fingerprint


def open_files() -> list[str]:
    """Return what the file descriptors of this process are."""
    entries = list(Path("/proc/self/fd").iterdir())
    # That of the listing itself is closed again.
    kinds = [str(entry.readlink()).partition(":")[0] for entry in entries if entry.is_symlink()]
    return sorted(kinds)


def state(server: Server, pair: tuple[Net, Net], loop: Loop) -> dict[str, Any]:
    """Return what the worker holds: weights as they are, not as the service tells."""
    gc.collect()
    with torch.no_grad():
        verifier, draft = live_weights(*pair)
    return {
        "verifier": fingerprint(verifier),
        "draft": fingerprint(draft),
        "shared": are_shared(*pair),
        "loop": loop.take(),
        "files": open_files(),
        # Threads of the pool stay; how many there are is how many calls ran at once.
        "threads": sorted(
            t.name for t in threading.enumerate() if not t.name.startswith("weightsync-")
        ),
        "staging_bytes": server.worker.staging_bytes,
        "open_streams": server.worker.open_streams,
    }


def pass_time(server: Server, seconds: float) -> None:
    """Let leases be older than they are: faults need no waiting, and none comes too early."""
    books = server.worker._books
    with books.lock:
        for session in books.table.open_sessions():
            session.expires -= seconds
        server.worker._reaper.wake()


def main(address: str, seed: int, grace: float) -> None:
    """Serve until SIGTERM."""
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    trace = Trace()
    armed = Armed(trace)
    pair = make_pair(seed)
    loop = Loop(*pair)
    # What goes wrong on the wire is to be seen: the bytes go over it.
    server = weightsync.serve(*pair, address=address, trace=trace, shared_memory=False)
    arena = FullArena(server.worker)
    armed.acts["fill"] = arena
    # What is there now stays: a collection looks at what the faults leave behind.
    gc.collect()
    gc.freeze()
    tell("ready", {"address": server.address, "instance_id": server.worker.instance_id})
    obey(
        {
            "arm": armed.arm,
            "go": armed.go,
            "fill": arena,
            "empty": arena.release,
            "pass_time": lambda seconds: pass_time(server, seconds),
            "state": lambda: state(server, pair, loop),
        }
    )
    while not stop.wait(0.1):
        pass
    server.stop(grace)
    loop.stop()
    tell("stopped", state(server, pair, loop))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
