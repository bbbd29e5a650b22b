"""What each fault does, once its place is reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weightsync_client import DeadlineError, Worker

from weightsync.testing.faults.cases import Case, Fault
from weightsync.testing.faults.child import until
from weightsync.testing.faults.processes import TrainerProcess, WorkerProcess
from weightsync.testing.faults.relay import Relay
from weightsync.testing.faults.seat import Seat

_DELAY = 0.005
"""Seconds for which a delayed connection holds each piece."""

_PIECE_BYTES = 256
"""Most bytes that a throttled connection forwards at once."""

_SILENCE = 0.2
"""Seconds without an answer after which a worker does stand still."""


class Happening:
    """One fault in one update: first it is set up, then it happens.

    At a step that is frozen meanwhile, except where the process itself is to die or to raise.
    """

    def __init__(self, case: Case, seats: Sequence[Seat], trainer: TrainerProcess) -> None:
        """Set it up for the last of the workers."""
        self._case = case
        self._seats = seats
        self._trainer = trainer
        self._unlucky = unlucky = seats[-1]
        self._teller: WorkerProcess | TrainerProcess | Relay
        if case.place.side == "wire":
            self._teller = unlucky.relay
            unlucky.relay.at(case.place.nth, Relay.freeze)
            return
        acts = {Fault.RAISE: "raise"}
        if case.place.side == "worker":
            self._teller = unlucky.worker
            acts |= {Fault.KILL_WORKER: "kill", Fault.FILL: "fill"}
        else:
            self._teller = trainer
            acts |= {Fault.KILL_CLIENT: "kill"}
        self._teller.arm(case.place.event, case.place.nth, acts.get(case.fault, "freeze"))

    @property
    def reached(self) -> bool:
        """Whether the update has come to the place."""
        if isinstance(self._teller, Relay):
            return self._teller.reached.is_set()
        return self._teller.heard("reached")

    def happen(self) -> None:
        """Do it, and let all go on."""
        does: Mapping[Fault, Callable[[], object]] = {
            Fault.KILL_CLIENT: self._trainer.kill,
            Fault.KILL_WORKER: self._unlucky.worker.kill,
            Fault.DROP: self._unlucky.relay.cut,
            Fault.FREEZE: self._expire,
            Fault.RAISE: lambda: None,
            Fault.FILL: self._unlucky.worker.fill,
            Fault.HALF_CLOSE: self._unlucky.relay.half_close,
            Fault.CORRUPT: self._unlucky.relay.corrupt,
            Fault.DELAY: lambda: self._unlucky.relay.slow_down(_DELAY),
            Fault.THROTTLE: lambda: self._unlucky.relay.throttle(_PIECE_BYTES),
            Fault.STOP_CLIENT: self._stop_client,
            Fault.STOP_WORKER: self._stop_worker,
        }
        does[self._case.fault]()
        self._unlucky.relay.thaw()
        if self._case.fault is not Fault.KILL_WORKER:
            self._unlucky.worker.go()
        if self._case.fault is not Fault.KILL_CLIENT:
            self._trainer.go()

    def _expire(self) -> None:
        for seat in self._seats:
            seat.worker.expire()

    def _stop_client(self) -> None:
        self._trainer.stop()
        self._expire()
        self._trainer.resume()

    def _stop_worker(self) -> None:
        worker = self._unlucky.worker
        worker.stop()
        with Worker(worker.address, timeout=_SILENCE) as asking:
            until(lambda: _is_silent(asking), "the worker stands still")
        worker.resume()


def _is_silent(worker: Worker) -> bool:
    try:
        worker.info()
    except DeadlineError:
        return True
    return False
