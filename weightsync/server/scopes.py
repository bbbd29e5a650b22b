"""What callers may do, and what each rpc takes."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from weightsync.core.types import Target


class AccessScope(enum.Enum):
    """What a token allows."""

    READ = "read"
    WRITE_VERIFIER = "write:verifier"
    WRITE_DRAFT = "write:draft"
    CONTROL = "control"


_READ = frozenset({AccessScope.READ})
_WRITE = frozenset({AccessScope.WRITE_VERIFIER, AccessScope.WRITE_DRAFT})
_CONTROL = frozenset({AccessScope.CONTROL})

SCOPES: Mapping[str, frozenset[AccessScope]] = {
    "GetWorker": _READ,
    "ListTensors": _READ,
    "GetWeightUpdate": _READ,
    "VerifyWeights": _READ,
    "ReadWeights": _READ,
    "WatchWorker": _READ,
    "StartWeightUpdate": _WRITE,
    "ListPlacements": _WRITE,
    "UpdateWeights": _WRITE,
    "PrepareWeightUpdate": _WRITE,
    "FinishWeightUpdate": _WRITE,
    "AbortWeightUpdate": _WRITE,
    "PauseGeneration": _CONTROL,
    "ResumeGeneration": _CONTROL,
    "Sleep": _CONTROL,
    "WakeUp": _CONTROL,
    "ResetPrefixCache": _CONTROL,
}
"""Of which scopes an rpc needs one. To write takes those of all targets of the session, too."""

SCOPE_OF_TARGET = {
    Target.VERIFIER: AccessScope.WRITE_VERIFIER,
    Target.DRAFT: AccessScope.WRITE_DRAFT,
}
"""What it takes to write a target."""
