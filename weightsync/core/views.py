"""What the worker tells: immutable answers, in core types. Times are Unix seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightsync.core.dtypes import DType
from weightsync.core.regions import Region
from weightsync.core.types import (
    CacheReset,
    Coordinates,
    Limits,
    Scope,
    SessionState,
    Target,
    TargetState,
    Transport,
    UpdateMode,
)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session; see the message `Session`."""

    session_id: str
    state: SessionState
    targets: frozenset[Target]
    scope: Scope
    mode: UpdateMode
    weight_version: str
    holder: str
    transport: Transport
    create_time: float
    expire_time: float
    received_bytes: int = 0
    missing_bytes: int = 0
    end_reason: str = ""


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """One target; see the message of the same name. `last_commit_time` is 0 before the first."""

    target: Target
    state: TargetState
    weight_version: str
    num_tensors: int
    num_bytes: int
    num_unwritten: int
    num_commits: int
    session_id: str = ""
    quarantine_reason: str = ""
    last_commit_time: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor; see the message of the same name."""

    target: Target
    name: str
    dtype: DType
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    share_group: str = ""
    written: bool = False
    composite: bool = False
    reloaded: bool = False


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identity and abilities of a worker; see the message `GetWorkerResponse`."""

    instance_id: str
    engine: str
    engine_version: str
    server_version: str
    coordinates: Coordinates
    targets: tuple[TargetStatus, ...]
    limits: Limits
    modes: tuple[UpdateMode, ...]
    controls: tuple[str, ...]
    transports: tuple[Transport, ...] = (Transport.INLINE,)
    shared_memory_socket: str = ""


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """One part of a tensor in an arena; see the message `Placement`. `strides` are bytes."""

    region: Region
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Where one tensor lies in an arena; see the message of the same name."""

    target: Target
    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[PlacedPart, ...]


@dataclass(frozen=True, slots=True)
class MissingTensor:
    """Elements of a tensor that have not arrived."""

    target: Target
    name: str
    regions: tuple[Region, ...]
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class StreamReport:
    """What one UpdateWeights stream brought."""

    received_bytes: int
    received_chunks: int
    applied_tensors: int
    ignored_names: tuple[str, ...]
    expire_time: float


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """A prepared session."""

    session: SessionInfo
    prepare_seconds: float


@dataclass(frozen=True, slots=True)
class CommitReport:
    """A committed session; see the message `FinishWeightUpdateResponse`."""

    session: SessionInfo
    targets: tuple[TargetStatus, ...]
    applied_tensors: int
    applied_bytes: int
    ignored_names: tuple[str, ...]
    receive_seconds: float
    prepare_seconds: float
    pause_seconds: float
    checked_share_groups: int
    cache_reset: CacheReset


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Digest of one region of a live tensor; `xxh3_128` is 16 bytes, big-endian."""

    target: Target
    name: str
    dtype: DType
    region: Region
    xxh3_128: bytes
    weight_version: str


class EventKind(enum.Enum):
    """What happened on a worker; numbers are those of the protobuf enum."""

    WATCHING = 1
    STARTED = 2
    PREPARED = 3
    COMMITTED = 4
    ABORTED = 5
    EXPIRED = 6
    FAILED = 7
    QUARANTINED = 8


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened on a worker."""

    sequence: int
    time: float
    kind: EventKind
    targets: frozenset[Target] = frozenset()
    session_id: str = ""
    weight_version: str = ""
    cause: str = ""
