"""One worker's place behind a relay: the worker may be another one tomorrow, the address stays."""

from __future__ import annotations

from pathlib import Path

from weightsync.testing.faults.processes import WorkerProcess
from weightsync.testing.faults.relay import Relay
from weightsync.testing.faults.scene import Scene


class Seat:
    """A worker, the relay before it, and what it is known to hold.

    Attributes:
        scene: The worker that sits there now.
        relay: Where trainers connect.
    """

    def __init__(self, worker: WorkerProcess, folder: Path) -> None:
        """Seat a worker; sockets lie in `folder`."""
        self.scene = Scene(worker)
        self.relay = Relay(worker.address, folder)

    @property
    def worker(self) -> WorkerProcess:
        """Who sits there now."""
        return self.scene.worker

    def replace(self, worker: WorkerProcess) -> None:
        """Seat another worker, which holds no version yet: as a restart does."""
        self.scene.close()
        self.worker.close()
        self.relay.to = worker.address
        self.scene = Scene(worker)

    def calm(self) -> None:
        """Let nothing more happen, and end all sessions."""
        self.worker.go()
        self.worker.empty()
        self.worker.forget()
        self.scene.expire()
        self.relay.heal()

    def close(self) -> None:
        """End the worker and the relay."""
        self.relay.close()
        self.scene.close()
        self.worker.close()
