"""Values of a small pair of models, by seed; numpy only, so that a trainer starts quickly."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import xxhash

Weights = dict[str, npt.NDArray[np.float32]]

SHARED = {"embed.weight": (256, 64), "head.weight": (256, 64)}
"""What the draft has from the verifier, by shape."""
OWN = {"fc.weight": (64, 64), "fc.bias": (64,)}
"""What each model has for itself."""


def verifier_weights(seed: int) -> Weights:
    """Return a version of the whole verifier."""
    return _weights({**SHARED, **OWN}, seed)


def draft_weights(seed: int) -> Weights:
    """Return a version of what only the draft holds."""
    return _weights(OWN, seed + 1_000_000)


def nbytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of parameters of some shapes."""
    return sum(4 * math.prod(shape) for shape in shapes.values())


def _weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}


def fingerprint(weights: Weights) -> str:
    """Return a digest of all names and bytes."""
    digest = xxhash.xxh3_128()
    for name, array in sorted(weights.items()):
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
