"""A push that is measured, as a whole and in its parts."""

from __future__ import annotations

import os

from torch import nn
from weightsync_client import Fleet, SendOptions, Session, verify

from benchmarks.models import nbytes
from benchmarks.process import Peer
from benchmarks.samples import Samples
from weightsync.core.types import Transport, UpdateMode


class Push:
    """Pushes of a module to one worker, and what they took."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        worker: Peer,
        mode: UpdateMode = UpdateMode.STAGED,
        transport: Transport = Transport.INLINE,
        *,
        computed: bool = False,
    ) -> None:
        """Connect to a worker that serves a module of the same form.

        Args:
            name: Of the row.
            module: What is pushed.
            worker: Where to.
            mode: Of the sessions.
            transport: The way of the bytes.
            computed: The weights are in the worker's arena already when they are pushed, as they
                are for a trainer that computes them there; how they come there is not measured.
        """
        size = nbytes(module)
        self.whole = Samples(name, size)
        self.transfer = Samples(f"{name}: transfer", size)
        self.pause = Samples(f"{name}: commit pause", size)
        self.opening = Samples(f"{name}: ListTensors and plan", size)
        self.mode = mode
        self.transport = transport
        self._module, self._worker, self._computed = module, worker, computed
        self._options = SendOptions(transports=(transport,))
        self._fleet = Fleet([worker.said])

    @property
    def samples(self) -> tuple[Samples, ...]:
        """All that is measured."""
        return self.whole, self.transfer, self.pause, self.opening

    def __call__(self) -> None:
        """Push once: from the first call until all bytes are live and acknowledged."""
        if self._computed:
            self._compute()
        session = self.whole.take(self._push, os.getpid(), self._worker.pid)
        commit = session.report.workers[0].commit
        assert commit is not None
        self.pause.seconds.append(commit.pause_seconds)

    def _push(self) -> Session:
        with self.opening.take(self._open) as session:
            self.transfer.take(lambda: self._transfer(session))
        return session

    def _open(self) -> Session:
        return self._fleet.update(
            target="verifier", version="next", mode=self.mode, options=self._options
        )

    def _transfer(self, session: Session) -> None:
        session.push(session.allocate() if self._computed else self._module)
        session.settle()

    def _compute(self) -> None:
        """Fill the arena, which the worker keeps for the session that is measured."""
        session = self._open()
        for name, place in session.allocate().items():
            place.copy_(self._module.get_parameter(name))
        session.abort()

    def verify(self) -> None:
        """Check that the worker holds what was pushed."""
        assert verify(self._fleet, self._module).equal

    def close(self) -> None:
        """Close the connection."""
        self._fleet.close()
