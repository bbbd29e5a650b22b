"""A worker in a process of its own: serves a pair under a forward loop, and obeys its test.

Reads commands from stdin and writes answers to stdout, one JSON object per line. SIGTERM stops
it as it stops `weightsync serve`; it then tells its last state.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import weightsync
from tests.faults.net import Net, answer, are_shared, live_weights, make_pair
from tests.faults.weights import fingerprint
from weightsync.core.errors import QuarantinedError
from weightsync.core.trace import Trace
from weightsync.server.server import Server

_output = threading.Lock()


def tell(**facts: object) -> None:
    """Write one line to the test."""
    with _output:
        print(json.dumps(facts), flush=True)  # noqa: T201 - how it talks


class Holds:
    """Stops the worker at a step of a session until the test lets it go on."""

    def __init__(self) -> None:
        self._armed: tuple[str, int] | None = None
        self._seen: Counter[str] = Counter()
        self._go = threading.Event()

    def arm(self, event: str, nth: int) -> None:
        """Hold at the nth time of an event, counted from now."""
        self._seen.clear()
        self._go.clear()
        self._armed = event, nth

    def go(self) -> None:
        """Let the worker go on, and hold it no more."""
        self._armed = None
        self._go.set()

    def hook(self, name: str, _facts: dict[str, object]) -> None:
        """Hold, if this is the place; a trace hook."""
        self._seen[name] += 1
        if self._armed == (name, self._seen[name]):
            tell(reached=name)
            self._go.wait()


class Loop:
    """Calls both models for ever, as an engine does that serves."""

    def __init__(self, verifier: Net, draft: Net) -> None:
        self._models = {"verifier": verifier, "draft": draft}
        self._lock = threading.Lock()
        self._rounds = 0
        self._refused = 0
        self._answers: dict[str, set[str]] = {name: set() for name in self._models}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Call no more: torch must not run in a thread that the interpreter leaves behind."""
        self._stop.set()
        self._thread.join()

    def take(self) -> dict[str, Any]:
        """Return what happened since the last time."""
        with self._lock:
            taken = {
                "rounds": self._rounds,
                "refused": self._refused,
                "answers": {name: sorted(seen) for name, seen in self._answers.items()},
            }
            self._rounds = self._refused = 0
            self._answers = {name: set() for name in self._models}
        return taken

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            for name, model in self._models.items():
                self._call(name, model)
            with self._lock:
                self._rounds += 1

    def _call(self, name: str, model: Net) -> None:
        try:
            seen = answer(model)
        except QuarantinedError:
            with self._lock:
                self._refused += 1
        else:
            with self._lock:
                self._answers[name].add(seen)


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


def expire(server: Server) -> None:
    """Let the time of all leases be over: faults need no waiting, and none comes too early."""
    books = server.worker._books
    with books.lock:
        for session in books.table.open_sessions():
            session.expires = 0.0
        server.worker._reaper.wake()


def main(address: str, seed: int, grace: float) -> None:
    """Serve until SIGTERM."""
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    holds = Holds()
    pair = make_pair(seed)
    loop = Loop(*pair)
    server = weightsync.serve(*pair, address=address, trace=Trace(holds.hook))
    # What is there now stays: a collection looks at what the faults leave behind.
    gc.collect()
    gc.freeze()
    tell(address=server.address, instance_id=server.worker.instance_id)

    def obey() -> None:
        # Unbuffered: a reader that waits with the buffer's lock would disturb the exit.
        for line in io.FileIO(sys.stdin.fileno(), closefd=False):
            command = json.loads(line)
            match command.pop("do"):
                case "hold":
                    holds.arm(**command)
                    tell(done="hold")
                case "go":
                    holds.go()
                    tell(done="go")
                case "expire":
                    expire(server)
                    tell(done="expire")
                case "state":
                    tell(state=state(server, pair, loop))
        # The test has gone: so does the worker.
        os._exit(1)

    threading.Thread(target=obey, name="obey", daemon=True).start()
    while not stop.wait(0.1):
        pass
    server.stop(grace)
    loop.stop()
    tell(stopped=state(server, pair, loop))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
