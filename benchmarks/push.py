"""A push that is measured, as a whole and in its parts."""

from __future__ import annotations

import os

from torch import nn
from weightsync_client import Fleet, Session, verify

from benchmarks.models import nbytes
from benchmarks.process import Peer
from benchmarks.samples import Samples
from weightsync.core.types import UpdateMode


class Push:
    """Pushes of a module to one worker, and what they took."""

    def __init__(
        self, name: str, module: nn.Module, worker: Peer, mode: UpdateMode = UpdateMode.STAGED
    ) -> None:
        """Connect to a worker that serves a module of the same form."""
        size = nbytes(module)
        self.whole = Samples(name, size)
        self.transfer = Samples(f"{name}: transfer", size)
        self.pause = Samples(f"{name}: commit pause", size)
        self.opening = Samples(f"{name}: ListTensors and plan", size)
        self.mode = mode
        self._module, self._worker = module, worker
        self._fleet = Fleet([worker.said])

    @property
    def samples(self) -> tuple[Samples, ...]:
        """All that is measured."""
        return self.whole, self.transfer, self.pause, self.opening

    def __call__(self) -> None:
        """Push once: from the first call until all bytes are live and acknowledged."""
        session = self.whole.take(self._push, os.getpid(), self._worker.pid)
        commit = session.report.workers[0].commit
        assert commit is not None
        self.pause.seconds.append(commit.pause_seconds)

    def _push(self) -> Session:
        with self.opening.take(self._open) as session:
            self.transfer.take(lambda: self._transfer(session))
        return session

    def _open(self) -> Session:
        return self._fleet.update(target="verifier", version="next", mode=self.mode)

    def _transfer(self, session: Session) -> None:
        session.push(self._module)
        session.settle()

    def verify(self) -> None:
        """Check that the worker holds what was pushed."""
        assert verify(self._fleet, self._module).equal

    def close(self) -> None:
        """Close the connection."""
        self._fleet.close()
