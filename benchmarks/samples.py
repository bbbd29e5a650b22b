"""Measured rounds, and rows that say what they came to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks import process

T = TypeVar("T")


@dataclass(slots=True)
class Samples:
    """The rounds of one way to move bytes.

    Attributes:
        name: Of the row.
        nbytes: What each round moves.
        seconds: Time of each round.
        cpu: CPU seconds of each round, per process.
        memory: Most extra bytes of each round, per process.
    """

    name: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    cpu: list[tuple[float, ...]] = field(default_factory=list)
    memory: list[tuple[int, ...]] = field(default_factory=list)

    def take(self, call: Callable[[], T], *pids: int) -> T:
        """Measure one round; `pids` are the processes that do the work."""
        for pid in pids:
            process.reset_peak(pid)
        memory = [process.resident_bytes(pid) for pid in pids]
        cpu = [process.cpu_seconds(pid) for pid in pids]
        start = time.perf_counter()
        result = call()
        self.seconds.append(time.perf_counter() - start)
        self.cpu.append(tuple(process.cpu_seconds(p) - c for p, c in zip(pids, cpu, strict=True)))
        self.memory.append(
            tuple(process.peak_bytes(p) - m for p, m in zip(pids, memory, strict=True))
        )
        return result

    def clear(self) -> None:
        """Forget the rounds so far: those that warmed up."""
        for rounds in (self.seconds, self.cpu, self.memory):
            rounds.clear()

    def row(self, yardstick: Samples | None = None, name: str = "") -> Row:
        """Return what it came to, under its own name or another.

        The ratio compares its rates with the yardstick's, round by round, in the median.
        """
        rates = [self.nbytes / s / 1e9 for s in self.seconds]
        ratio = None
        if yardstick is not None:
            theirs = [yardstick.nbytes / s / 1e9 for s in yardstick.seconds]
            ratio = statistics.median(a / b for a, b in zip(rates, theirs, strict=True))
        gib = self.nbytes / 2**30
        return Row(
            name or self.name,
            statistics.median(self.seconds),
            statistics.median(rates),
            min(rates),
            max(rates),
            tuple(statistics.median(c) / gib for c in zip(*self.cpu, strict=True)),
            tuple(round(statistics.median(m) / 2**20) for m in zip(*self.memory, strict=True)),
            "" if yardstick is None else yardstick.name,
            ratio,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: What was measured.
        seconds: Median time of a round.
        gb_per_second: Median rate, in 1e9 bytes per second.
        slowest: Lowest rate of a round.
        fastest: Highest rate of a round.
        cpu_seconds_per_gib: Of the sender, and of the worker.
        extra_mib: Of the sender, and of the worker.
        beside: The row that it is compared with.
        ratio: Median over the rounds of its rate by that row's.
    """

    name: str
    seconds: float
    gb_per_second: float
    slowest: float
    fastest: float
    cpu_seconds_per_gib: tuple[float, ...]
    extra_mib: tuple[int, ...]
    beside: str
    ratio: float | None
