"""The test's end of a worker's or a trainer's process."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

from tests.faults.weights import draft_weights, fingerprint, verifier_weights

ROOT = Path(__file__).parents[2]
T = TypeVar("T")

PATIENCE = 60.0
"""How long anything may take before a test fails, in seconds."""


def until(probe: Callable[[], T | None], what: str) -> T:
    """Ask again and again until the answer is true."""
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while True:
        if found := probe():
            return found
        assert time.monotonic() < end, f"never happened: {what}"
        pause.wait(0.02)


def _spawn(module: str, *args: str) -> subprocess.Popen[str]:
    # What it holds is asked for, so its errors may go where the test's own go.
    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients'}"},
    )


class WorkerProcess:
    """A worker that serves a pair under a forward loop."""

    def __init__(self, address: str, *, seed: int = 0, grace: float = 0.0) -> None:
        self._process = _spawn("tests.faults.worker", address, str(seed), str(grace))
        self._told: dict[str, queue.SimpleQueue[Any]] = {
            kind: queue.SimpleQueue()
            for kind in ("address", "reached", "done", "state", "stopped", "end")
        }
        threading.Thread(target=self._listen, daemon=True).start()
        self._hello: dict[str, Any] | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self._ready()["address"])

    @property
    def instance_id(self) -> str:
        """Which process it is."""
        return str(self._ready()["instance_id"])

    def hold(self, event: str, nth: int = 1) -> None:
        """Hold it at the nth time of a trace event."""
        self._command(do="hold", event=event, nth=nth)
        self._hear("done")

    def wait_held(self) -> None:
        """Wait until it has come there."""
        self._hear("reached")

    def go(self) -> None:
        """Let it go on."""
        self._command(do="go")
        self._hear("done")

    def expire(self) -> None:
        """Let the time of all leases be over, except of what is being finished."""
        self._command(do="expire")
        self._hear("done")

    def state(self) -> State:
        """Return what it holds."""
        self._command(do="state")
        return State(self._hear("state")["state"])

    def terminate(self) -> None:
        """Ask it to stop, as an operator does."""
        self._process.send_signal(signal.SIGTERM)

    def wait_stopped(self) -> State:
        """Wait until it has stopped well, and return what it held."""
        last = State(self._hear("stopped")["stopped"])
        assert self._process.wait(PATIENCE) == 0
        return last

    def kill(self) -> None:
        """End it at once, as nobody should."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def __enter__(self) -> Self:
        self._ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _ready(self) -> dict[str, Any]:
        if self._hello is None:
            self._hello = self._hear("address")
        return self._hello

    def _command(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _hear(self, kind: str) -> dict[str, Any]:
        told: dict[str, Any] = self._told[kind].get(timeout=PATIENCE)
        return told

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            self._told[next(iter(told))].put(told)


class State:
    """What a worker holds, bit for bit, and what its forward loop saw since the last question."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told

    def __repr__(self) -> str:
        return json.dumps(self._told, indent=1)

    def holds(self, verifier: int, draft: int) -> bool:
        """Tell whether verifier and draft are exactly versions, held once where they are equal."""
        told = (self._told["verifier"], self._told["draft"], self._told["shared"])
        versions = fingerprint(verifier_weights(verifier)), fingerprint(draft_weights(draft))
        return told == (*versions, True)

    @property
    def answers(self) -> dict[str, set[str]]:
        """Digests of what each model computed."""
        return {name: set(seen) for name, seen in self._told["loop"]["answers"].items()}

    @property
    def rounds(self) -> int:
        """How often both models were called."""
        return int(self._told["loop"]["rounds"])

    @property
    def refused(self) -> int:
        """How many calls were refused because of a quarantine."""
        return int(self._told["loop"]["refused"])

    @property
    def holdings(self) -> dict[str, Any]:
        """Threads, open files and bytes: what must not pile up."""
        names = ("files", "threads", "staging_bytes", "open_streams")
        return {name: self._told[name] for name in names}


class TrainerProcess:
    """A trainer that pushes one version to some workers."""

    def __init__(
        self,
        *addresses: str,
        seed: int,
        targets: Sequence[str] = ("verifier", "draft"),
        mode: str = "STAGED",
        lease: float | None = None,
        chunk_bytes: int = 8192,
        window_bytes: int = 1 << 26,
        patience: float = 20.0,
        timeout: float = 30.0,
    ) -> None:
        order = {
            "addresses": addresses,
            "seed": seed,
            "targets": targets,
            "mode": mode,
            "lease": lease,
            "chunk_bytes": chunk_bytes,
            "window_bytes": window_bytes,
            "patience": patience,
            "timeout": timeout,
        }
        self._process = _spawn("tests.faults.trainer", json.dumps(order))

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.communicate(timeout=PATIENCE)

    def result(self) -> dict[str, Any]:
        """Wait for its end; `{}` if it committed, else the error."""
        out, _ = self._process.communicate(timeout=PATIENCE)
        result: dict[str, Any] = json.loads(out)
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
