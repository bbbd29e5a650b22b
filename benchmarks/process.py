"""Processes beside the benchmark, and what a process uses, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that runs: its id, and the line that it said when it was ready."""

    pid: int
    said: str


@contextmanager
def peer(module: str, *arguments: str) -> Iterator[Peer]:
    """Run a module of this folder until the block ends; its input ends then."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield Peer(process.pid, process.stdout.readline().strip())
        finally:
            process.communicate(timeout=60)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, in user and kernel; counted in ticks of 10 ms."""
    # The name of the program is in brackets and may hold spaces.
    numbers = _proc(pid, "stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) * _TICK


def resident_bytes(pid: int) -> int:
    """Return what a process holds in memory now, shared memory included."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """Return the most that a process held in memory since `reset_peak`."""
    return _status(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    """Count the peak from now on."""
    _proc(pid, "clear_refs").write_text("5")


def _status(pid: int, field: str) -> int:
    for line in _proc(pid, "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * _KIB
    raise ValueError(f"the kernel tells no {field}")


def _proc(pid: int, name: str) -> Path:
    return Path("/proc", str(pid), name)
