"""The words of the contract as Python values; numbers are those of the protobuf enums."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightsync.core.dtypes import DType
from weightsync.core.regions import Region


class Target(enum.Enum):
    """Which of a worker's models."""

    VERIFIER = 1
    DRAFT = 2

    # Members are singletons; the hash of an enum would be a call into Python per look-up.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        """Return the word in lower case, as logs, metrics and the command line use it."""
        return self.name.lower()


class Scope(enum.Enum):
    """All of a target, or a part of it."""

    FULL = 1
    PARTIAL = 2


class UpdateMode(enum.Enum):
    """Through the arena, or straight into live weights."""

    STAGED = 1
    IN_PLACE = 2


class SharedTensorPolicy(enum.Enum):
    """What happens to a draft session's tensor that is one storage with the verifier's."""

    REFUSE = 1
    ACCEPT_EQUAL = 2
    UNSHARE = 3


class CastPolicy(enum.Enum):
    """What happens to a tensor of another element type."""

    REFUSE = 1
    ALLOW = 2


class TargetState(enum.Enum):
    """Whether a target may serve."""

    READY = 1
    ASLEEP = 2
    QUARANTINED = 3


class SessionState(enum.Enum):
    """Where a session stands."""

    OPEN = 1
    PREPARED = 2
    COMMITTED = 3
    ABORTED = 4
    EXPIRED = 5
    FAILED = 6

    @property
    def ended(self) -> bool:
        """Tell whether the session holds its targets no longer."""
        return self not in (SessionState.OPEN, SessionState.PREPARED)


class CacheReset(enum.Enum):
    """What became of an engine's cache of results made with old weights."""

    NONE = 1
    DONE = 2
    FAILED = 3


class Transport(enum.Enum):
    """How bytes reach the worker."""

    INLINE = 1
    SHARED_MEMORY = 2


class Encoding(enum.Enum):
    """How bytes stand for elements."""

    DENSE = 1

    __hash__ = object.__hash__


class ChecksumType(enum.Enum):
    """How a payload is protected."""

    NONE = 1
    XXH3_64 = 2
    CRC32C = 4


@dataclass(frozen=True, slots=True)
class TensorKey:
    """A tensor's name within a worker."""

    target: Target
    name: str

    def __str__(self) -> str:
        """Return e.g. `verifier:model.norm.weight`."""
        return f"{self.target}:{self.name}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes of one region of one tensor; see the message of the same name.

    Attributes:
        target: The model.
        name: Checkpoint name.
        dtype: Element type of the bytes.
        shape: Global shape, in elements.
        region: The part that is being sent, in elements of the global shape.
        byte_offset: First byte, counted in the region's row-major bytes.
        byte_length: Number of bytes.
        encoding: How to read them.
        placed: They are in the mapped arena already, and not in the payload.
    """

    target: Target
    name: str
    dtype: DType
    shape: tuple[int, ...]
    region: Region
    byte_offset: int
    byte_length: int
    encoding: Encoding = Encoding.DENSE
    placed: bool = False

    @property
    def key(self) -> TensorKey:
        """The tensor."""
        return TensorKey(self.target, self.name)

    @property
    def is_whole(self) -> bool:
        """Tell whether it brings every byte of a tensor that has some."""
        return (
            self.region.sizes == self.shape
            and 0 < self.byte_length == self.region.numel * self.dtype.itemsize
        )


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Place of a worker among its peers."""

    rank: int = 0
    world_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that a worker enforces; bytes, counts and seconds.

    Attributes:
        max_message_bytes: Largest gRPC message.
        max_name_bytes: Longest tensor name, in UTF-8.
        max_segments: Most segments in one message.
        max_streams: Most UpdateWeights streams at once.
        max_readers: Most ListTensors, VerifyWeights and ReadWeights streams at once.
        max_watchers: Most WatchWorker streams at once.
        max_arena_bytes: Most staged bytes over all sessions.
        max_spare_bytes: Most bytes of arenas that are kept for the next session, though none is
            open. New memory costs a page fault per 4 KiB, often more than the bytes' whole way.
        max_dims: Most dimensions of a tensor.
        max_sessions: How many ended sessions are remembered, so that a repeated call gets its
            answer.
        max_names: Most names, or patterns of names, in one request.
        default_lease: Lease of a session that names none, in seconds.
        max_lease: Longest lease that is granted, in seconds.
        gate_timeout: Longest wait for a step boundary, in seconds.
        drain_timeout: Longest wait for a session's open streams to end at prepare, in seconds.
    """

    max_message_bytes: int = 4 << 20
    max_name_bytes: int = 1024
    max_segments: int = 65536
    max_streams: int = 32
    max_readers: int = 16
    max_watchers: int = 32
    max_arena_bytes: int = 1 << 40
    max_spare_bytes: int = 0
    max_dims: int = 16
    max_sessions: int = 256
    max_names: int = 65536
    default_lease: float = 60.0
    max_lease: float = 3600.0
    gate_timeout: float = 30.0
    drain_timeout: float = 10.0

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload a sender should put into a message: 64 KiB are left for its header."""
        return self.max_message_bytes - (64 << 10)


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """What StartWeightUpdate asks for."""

    targets: frozenset[Target]
    scope: Scope
    weight_version: str
    request_id: str = ""
    expected_base_versions: tuple[tuple[Target, str], ...] = ()
    mode: UpdateMode = UpdateMode.STAGED
    transports: tuple[Transport, ...] = (Transport.INLINE,)
    lease: float | None = None
    shared_tensors: SharedTensorPolicy = SharedTensorPolicy.REFUSE
    cast: CastPolicy = CastPolicy.REFUSE
    ignore_names: tuple[str, ...] = ()
    check_finite: bool = False
    holder: str = ""
    prepared_lease: float | None = None
    shared_memory_id: str = ""
