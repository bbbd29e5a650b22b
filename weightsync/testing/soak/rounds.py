"""Which update is made with which fault: drawn from a seed, each for itself."""

from __future__ import annotations

import random

from weightsync.testing.faults.cases import (
    AT_STEPS,
    MODES,
    ON_THE_WIRE,
    PLACES,
    TARGETS,
    Case,
    Fault,
    Place,
)
from weightsync.testing.faults.weights import OWN, SHARED, nbytes

_CHUNK_BYTES = (1024, 4096, 8192, 65536)
_MAX_STREAMS = 2

_OPENING_BYTES = 3_000
"""Bytes that go up before the first weights do.

A bit that turns over in them may change a name, which only TLS protects.
"""


def draw(seed: int, index: int, max_workers: int) -> Case:
    """Return the update of a number within the run of a seed: always the same one."""
    rng = random.Random(f"{seed}/{index}")  # noqa: S311 - nobody has to guess it
    targets = rng.choice(TARGETS)
    chunk_bytes = rng.choice(_CHUNK_BYTES)
    parameters = {"verifier": {**SHARED, **OWN}, "draft": OWN}
    size = sum(nbytes(parameters[target]) for target in targets)
    if rng.random() < 0.5:  # noqa: PLR2004 - as often on the wire as at a step
        fault = rng.choice(ON_THE_WIRE)
        first = _OPENING_BYTES if fault is Fault.CORRUPT else 0
        place = Place("wire", "byte", rng.randrange(first, first + size))
    else:
        fault = rng.choice(AT_STEPS)
        place = rng.choice(PLACES)
        times = {
            "chunk": size // chunk_bytes + 1,
            "message": size // chunk_bytes + 1,
            "commit.parameter": sum(len(parameters[target]) for target in targets),
        }
        step = place.event if place.event in times else place.event.partition(".")[0]
        place = Place(place.side, place.event, rng.randint(1, times.get(step, 1)))
    return Case(
        place,
        fault,
        mode=rng.choice(MODES),
        targets=targets,
        num_workers=rng.randint(1, max_workers),
        chunk_bytes=chunk_bytes,
        streams=rng.randint(1, _MAX_STREAMS),
    )
