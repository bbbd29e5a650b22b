"""Plays one drawn update after the other until the time is over or a promise is broken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from weightsync.testing.faults.child import BrokenPromiseError
from weightsync.testing.faults.stage import Stage
from weightsync.testing.soak.rounds import draw


@dataclass(frozen=True, slots=True)
class Tally:
    """What a run has seen so far.

    Attributes:
        updates: Updates with a fault, as drawn; between any two another one without must succeed.
        faults: How many of the drawn places were reached.
        sent_bytes: Bytes that went up to the workers in the updates with a fault.
        seconds: How long it took.
    """

    updates: int = 0
    faults: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0


class SoakError(Exception):
    """A promise was broken; `command` shows it again."""

    def __init__(self, seed: int, index: int, workers: int, cause: BrokenPromiseError) -> None:
        """Tell of the update of a number."""
        self.command = f"weightsync soak --seed {seed} --workers {workers} --only {index}"
        super().__init__(f"update {index} ({draw(seed, index, workers)}): {cause}")


class Soak:
    """A run: workers and a trainer, on whom faults fall."""

    def __init__(self, stage: Stage, seed: int, workers: int) -> None:
        """Take a stage of so many workers."""
        self._stage = stage
        self._seed = seed
        self._workers = workers

    @classmethod
    @contextmanager
    def open(cls, seed: int, workers: int) -> Iterator[Soak]:
        """Start workers and a trainer; they end with the block."""
        with (
            TemporaryDirectory(prefix="weightsync-soak-") as folder,
            Stage(workers, Path(folder)) as stage,
        ):
            yield cls(stage, seed, workers)

    def play(self, indices: Iterator[int], seconds: float) -> Iterator[Tally]:
        """Play updates until the time is over; yield what was seen after each.

        Raises:
            SoakError: a promise was broken.
        """
        start = time.monotonic()
        faults = 0
        for updates, index in enumerate(indices, 1):
            try:
                faults += self._stage.play(draw(self._seed, index, self._workers)).reached
            except BrokenPromiseError as error:
                raise SoakError(self._seed, index, self._workers, error) from error
            passed = time.monotonic() - start
            yield Tally(updates, faults, self._stage.sent_bytes, passed)
            if passed >= seconds:
                return
