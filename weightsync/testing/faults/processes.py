"""The parent's end of workers and trainers."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import Any

from typing_extensions import Self

from weightsync.testing.faults.child import PATIENCE, Child, promise
from weightsync.testing.faults.weights import draft_weights, fingerprint, verifier_weights

BOTH = ("verifier", "draft")


class WorkerProcess(Child):
    """A worker that serves a pair under a forward loop."""

    def __init__(self, address: str = "127.0.0.1:0", *, seed: int = 0, grace: float = 0.0) -> None:
        """Start it with a version of both models; `grace` is its patience at SIGTERM."""
        super().__init__("weightsync.testing.faults.worker", address, str(seed), str(grace))
        self._hello: dict[str, Any] | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self._ready()["address"])

    @property
    def instance_id(self) -> str:
        """Which process it is."""
        return str(self._ready()["instance_id"])

    def wait_reached(self) -> None:
        """Wait until it has come to its failpoint."""
        self.hear("reached")

    def fill(self) -> None:
        """Let other sessions take all the room of its arena."""
        self.ask("fill")

    def empty(self) -> None:
        """Let them end."""
        self.ask("empty")

    def pass_time(self, seconds: float) -> None:
        """Let its leases be older than they are, except of what is being finished."""
        self.ask("pass_time", seconds=seconds)

    def expire(self) -> None:
        """Let the time of all leases be over, except of what is being finished."""
        self.pass_time(1e9)

    def state(self) -> State:
        """Return what it holds."""
        return State(self.ask("state"))

    def terminate(self) -> None:
        """Ask it to stop, as an operator does."""
        self._process.send_signal(signal.SIGTERM)

    def wait_stopped(self) -> State:
        """Wait until it has stopped well, and return what it held."""
        last = State(self.hear("stopped")[1])
        promise(self._process.wait(PATIENCE) == 0, "the worker ends with 0")
        return last

    def __enter__(self) -> Self:
        self._ready()
        return self

    def _ready(self) -> dict[str, Any]:
        if self._hello is None:
            self._hello = self.hear("ready")[1]
        return self._hello


class State:
    """What a worker holds, bit for bit, and what its forward loop saw since the last question."""

    def __init__(self, told: dict[str, Any]) -> None:
        """Take what the worker told."""
        self._told = told

    def __repr__(self) -> str:
        return json.dumps(self._told, indent=1)

    def holds(self, verifier: int, draft: int) -> bool:
        """Tell whether verifier and draft are exactly versions, held once where they are equal."""
        told = (self._told["verifier"], self._told["draft"], self._told["shared"])
        versions = fingerprint(verifier_weights(verifier)), fingerprint(draft_weights(draft))
        return told == (*versions, True)

    @property
    def shared(self) -> bool:
        """Whether what both models have in common is one storage."""
        return bool(self._told["shared"])

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


class TrainerProcess(Child):
    """A trainer that pushes versions to some workers."""

    def __init__(self, *addresses: str, seed: int | None = None, **order: Any) -> None:  # noqa: ANN401 - of push
        """Start it; with a seed it pushes at once, see `push`."""
        super().__init__("weightsync.testing.faults.trainer")
        if seed is not None:
            self.push(*addresses, seed=seed, **order)

    def push(
        self,
        *addresses: str,
        seed: int,
        targets: Sequence[str] = BOTH,
        mode: str = "STAGED",
        timeout: float = 30.0,
        chunk_bytes: int = 8192,
        window_bytes: int = 1 << 26,
        patience: float = 20.0,
        streams: int = 1,
        **update: Any,  # noqa: ANN401 - of Fleet.update
    ) -> None:
        """Let it push a version; `result` tells how it went."""
        options = {
            "chunk_bytes": chunk_bytes,
            "window_bytes": window_bytes,
            "patience": patience,
            "streams": streams,
        }
        self.ask(
            "push",
            addresses=addresses,
            seed=seed,
            targets=targets,
            mode=mode,
            timeout=timeout,
            options=options,
            update=update,
        )

    def result(self) -> dict[str, Any]:
        """Wait for the end of a push; `{}` if it committed, else the error."""
        found: dict[str, Any] = self.hear("result")[1]
        return found
