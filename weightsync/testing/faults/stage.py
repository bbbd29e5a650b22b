"""Workers and a trainer, on which one case after the other is played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self
from weightsync_client import Fleet, Outcome, push_model, repair

from weightsync.core.errors import WeightSyncError
from weightsync.testing.faults.cases import Case, Fault
from weightsync.testing.faults.child import BrokenPromiseError, promise, until
from weightsync.testing.faults.happenings import Happening
from weightsync.testing.faults.processes import TrainerProcess, WorkerProcess
from weightsync.testing.faults.scene import Scene, Verdict, updated
from weightsync.testing.faults.seat import Seat
from weightsync.testing.faults.trainer import SOURCES

_TIMEOUT = 10.0
_PATIENCE = 0.3

Result = dict[str, Any]
"""What a trainer told at its end: `{}`, or the error."""


@dataclass(frozen=True, slots=True)
class Played:
    """A case that was played, and in which all promises held.

    Attributes:
        reached: Whether the update came to the place of the fault.
        result: What its trainer told; None if it was killed.
        verdicts: What each worker held afterwards.
    """

    reached: bool
    result: Result | None
    verdicts: tuple[Verdict, ...]


class Stage:
    """Some workers, and a trainer; who is killed is replaced.

    Attributes:
        sent_bytes: Bytes that went to the workers in all cases.
    """

    def __init__(self, num_workers: int, folder: Path) -> None:
        """Start everything; sockets lie in `folder`."""
        self.sent_bytes = 0
        # All at once, with one of each kind to spare: they take longer to start than to serve.
        workers = [WorkerProcess() for _ in range(num_workers + 1)]
        self._trainer, self._next_trainer = TrainerProcess(), TrainerProcess()
        self._next_worker = workers.pop()
        self._seats = [Seat(worker, folder) for worker in workers]
        self._recover()

    def play(self, case: Case) -> Played:
        """Play a case and see that what is promised holds.

        Raises:
            BrokenPromiseError: something does not hold.
        """
        try:
            return self._play(case)
        except WeightSyncError as error:
            raise BrokenPromiseError(f"who was not hit answers, and is updated: {error}") from error

    def _play(self, case: Case) -> Played:
        seats = self._seats[: case.num_workers]
        before = [seat.scene for seat in seats]
        seed = Scene.new_seed()
        happening = Happening(case, seats, self._trainer)
        self._trainer.push(
            *(seat.relay.address for seat in seats),
            seed=seed,
            targets=case.targets,
            mode=case.mode,
            timeout=_TIMEOUT,
            patience=_PATIENCE,
            chunk_bytes=case.chunk_bytes,
            streams=case.streams,
        )
        until(
            lambda: happening.reached or self._trainer.heard("result"),
            f"{case.place} is reached, or the update ends",
        )
        reached = happening.reached
        if reached:
            happening.happen()
        result = self._end(case.fault if reached else None, seats[-1])
        verdicts = [
            seat.scene.verdict(seed, case.targets) if seat.scene is scene else Verdict.RESTARTED
            for seat, scene in zip(seats, before, strict=True)
        ]
        judge(case, result, verdicts)
        if Verdict.NEW in verdicts and Verdict.QUARANTINED not in verdicts:
            self._repair(seats, seed, case.targets)
        self._recover()
        return Played(reached, result, tuple(verdicts))

    def close(self) -> None:
        """End everything."""
        for seat in self._seats:
            seat.close()
        for child in (self._trainer, self._next_trainer, self._next_worker):
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, fault: Fault | None, unlucky: Seat) -> Result | None:
        """Wait for the trainer's end, replace who is dead, and let all come to rest."""
        result = None
        if fault is Fault.KILL_CLIENT:
            self._trainer.close()
            self._trainer, self._next_trainer = self._next_trainer, TrainerProcess()
        else:
            result = self._trainer.result()
            self._trainer.go()
            self._trainer.forget()
        if fault is Fault.KILL_WORKER:
            unlucky.replace(self._next_worker)
            self._next_worker = WorkerProcess()
        for seat in self._seats:
            self.sent_bytes += seat.relay.bytes_up
            seat.calm()
        return result

    def _fleet(self, seats: Sequence[Seat]) -> Fleet:
        return Fleet([seat.relay.address for seat in seats])

    def _repair(self, seats: Sequence[Seat], seed: int, targets: Sequence[str]) -> None:
        """Bring those that lack a version to it, and see that they are."""
        given = [source(seed) if n in targets else None for n, source in SOURCES.items()]
        with self._fleet(seats) as fleet:
            report = repair(fleet, *given, version=f"v{seed}")
        promise(report.committed, f"a mixed fleet can be repaired: {report}")
        for seat in seats:
            seat.scene.old = updated(seat.scene.old, seed, targets)
            seat.scene.check(seat.scene.old)

    def _recover(self) -> None:
        """See that the next update succeeds everywhere and that nothing is left."""
        seed = Scene.new_seed()
        with self._fleet(self._seats) as fleet:
            push_model(fleet, *(source(seed) for source in SOURCES.values()), version=f"v{seed}")
        for seat in self._seats:
            seat.scene.old = (seed, seed)
            seat.scene.check(seat.scene.old)
        for seat in self._seats:
            seat.scene.check_clean()


def judge(case: Case, result: Result | None, verdicts: Sequence[Verdict]) -> None:
    """See that what the trainer was told fits what the workers hold.

    Args:
        case: What was played.
        result: What the trainer told; None if it was killed.
        verdicts: What each worker holds.

    Raises:
        BrokenPromiseError: it does not.
    """
    story = f"{case}: {result}, {[verdict.value for verdict in verdicts]}"
    promise(
        case.mode == "IN_PLACE" or Verdict.QUARANTINED not in verdicts,
        f"a STAGED update quarantines nothing: {story}",
    )
    if result is None:
        return
    error = result.get("error")
    promise(
        error != "InternalError" or case.fault is Fault.RAISE,
        f"no fault is one of the worker's own: {story}",
    )
    alive = [verdict for verdict in verdicts if verdict is not Verdict.RESTARTED]
    if error is None:
        promise(set(alive) <= {Verdict.NEW}, f"what is told to be committed is live: {story}")
    elif error == "FleetError":
        for outcome, verdict in zip(result["outcomes"], verdicts, strict=True):
            fitting = _FITTING[outcome]
            promise(verdict in fitting, f"the report says what each worker holds: {story}")
    elif not _may_have_committed(case, error):
        promise(Verdict.NEW not in alive, f"an update that failed is live nowhere: {story}")


_FITTING = {
    Outcome.COMMITTED.value: (Verdict.NEW, Verdict.RESTARTED),
    Outcome.HELD.value: (Verdict.NEW, Verdict.RESTARTED),
    Outcome.NOT_COMMITTED.value: (Verdict.OLD, Verdict.QUARANTINED, Verdict.RESTARTED),
    Outcome.UNKNOWN.value: tuple(Verdict),
}


def _may_have_committed(case: Case, error: str) -> bool:
    """Tell whether an error leaves open what became of the second phase."""
    lost = case.num_workers == 1 and error in ("ConnectionLostError", "DeadlineError")
    raised = error == "FailpointError" and "finish" in case.place.event
    return lost or raised
