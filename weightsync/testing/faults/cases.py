"""What can go wrong, where, and in which kind of update: what tests and soak draw from."""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weightsync.core.trace import CLIENT_STEPS, WORKER_STEPS, Step
from weightsync.testing.faults.processes import BOTH

Side = Literal["worker", "client", "wire"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in an update something goes wrong.

    Attributes:
        side: In the worker, in the client, or on the connection between them.
        event: Of a step on that side; `byte` on the wire.
        nth: The nth time of the event; on the wire the number of the byte.
    """

    side: Side
    event: str
    nth: int = 1

    def __str__(self) -> str:
        """Return e.g. `worker chunk.completed 3`."""
        return f"{self.side} {self.event} {self.nth}"


class Fault(enum.Enum):
    """What goes wrong there."""

    KILL_CLIENT = "kill the client"
    KILL_WORKER = "kill the worker"
    DROP = "drop the connection"
    FREEZE = "freeze for longer than the lease"
    RAISE = "raise an error"
    FILL = "fill the arena"

    HALF_CLOSE = "half close the connection"
    CORRUPT = "turn over a bit"
    DELAY = "delay the connection"
    THROTTLE = "throttle the connection"
    STOP_CLIENT = "stop the client for longer than the lease"
    STOP_WORKER = "stop the worker for a while"


AT_STEPS: tuple[Fault, ...] = tuple(Fault)[:6]
"""Faults at a step."""
ON_THE_WIRE: tuple[Fault, ...] = tuple(
    fault for fault in Fault if fault not in (Fault.RAISE, Fault.FILL)
)
"""Faults at a byte."""

# Reached only when something has failed already.
_LATER = ("rollback", "quarantine", "quarantine.lifted")
_MANY = ("chunk", "message")
# For a client no places of their own: its first step follows at once, or its last is over.
_ENDS = ("session.started", "session.ended")


def _places(side: Side, steps: Sequence[Step]) -> Iterator[Place]:
    for step in steps:
        for event in step.events:
            if side == "client" and step.name in _ENDS:
                continue
            if step.name not in _LATER and not event.endswith(".failed"):
                # The first chunk of a stream only names the session.
                yield Place(side, event, 3 if step.name in _MANY else 1)


PLACES = (*_places("worker", WORKER_STEPS), *_places("client", CLIENT_STEPS))
"""Every step that an update takes, on both sides."""

TARGETS = (("verifier",), ("draft",), BOTH)
MODES = ("STAGED", "IN_PLACE")
WORKERS = (1, 3)


@dataclass(frozen=True, slots=True)
class Case:
    """One update with one fault.

    Attributes:
        place: Where it happens.
        fault: What happens.
        mode: Of the session.
        targets: Of the session.
        num_workers: How many workers are updated; it happens to the last one.
        chunk_bytes: Payload of a message.
        streams: Connections per worker.
    """

    place: Place
    fault: Fault
    mode: str = "STAGED"
    targets: tuple[str, ...] = BOTH
    num_workers: int = 1
    chunk_bytes: int = 8192
    streams: int = 1

    def __str__(self) -> str:
        """Return what happens, in a line."""
        return (
            f"{self.fault.value} at {self.place}, {' and '.join(self.targets)} {self.mode},"
            f" workers {self.num_workers}, chunk_bytes {self.chunk_bytes}, streams {self.streams}"
        )


AXES: tuple[tuple[Any, ...], ...] = (PLACES, AT_STEPS, MODES, TARGETS, WORKERS)
"""The matrix: every combination is a case."""


def matrix() -> list[Case]:
    """Return all cases."""
    return [Case(*values) for values in itertools.product(*AXES)]


def covering() -> list[Case]:
    """Return few cases in which any two values of two axes meet: each step with each fault, ..."""
    left = {
        pair
        for (i, a), (j, b) in itertools.combinations(enumerate(AXES), 2)
        for pair in itertools.product(((i, value) for value in a), ((j, value) for value in b))
    }
    cases: list[Case] = []
    # Equal gains are drawn for, lest a fault always meets the same kind of update.
    rng = random.Random(0)  # noqa: S311 - always the same ones
    # The longest axes first: each of their pairs needs a case of its own.
    for place, fault in itertools.product(*AXES[:2]):
        chosen = [(0, place), (1, fault)]
        for axis in range(2, len(AXES)):
            gains = {value: sum((c, (axis, value)) in left for c in chosen) for value in AXES[axis]}
            values = rng.sample(AXES[axis], len(AXES[axis]))
            chosen.append((axis, max(values, key=gains.__getitem__)))
        left -= set(itertools.combinations(chosen, 2))
        cases.append(Case(*(value for _, value in chosen)))
    return cases
