"""Every way in which a call can fail, once.

`Reason` is the contract's enum by name; the status code of each lives in `weightsync.wire.status`.
The worker raises these classes, and the client raises the same ones from what it received.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import ClassVar


class Reason(enum.Enum):
    """Why a call failed, for programs; the names of `weightsync.v1.Reason` without prefix."""

    INVALID_REQUEST = 1
    SHAPE_MISMATCH = 2
    DTYPE_MISMATCH = 3
    OUT_OF_BOUNDS = 4
    MALFORMED_PAYLOAD = 5
    OVERLAP_CONFLICT = 6
    UNKNOWN_TENSOR = 7
    UNKNOWN_SESSION = 8
    TARGET_ABSENT = 9
    UNSUPPORTED = 10
    REQUEST_ID_REUSED = 11
    TARGET_BUSY = 12
    BASE_VERSION_MISMATCH = 13
    CHECKSUM_MISMATCH = 14
    VERSION_CHANGED = 15
    INCOMPLETE = 16
    NOTHING_APPLIED = 17
    SESSION_STATE = 18
    SESSION_EXPIRED = 19
    SHARED_WEIGHT = 20
    NOT_FINITE = 21
    STREAMS_OPEN = 22
    QUARANTINED = 23
    ARENA_FULL = 24
    TOO_MANY_STREAMS = 25
    DRAINING = 26
    ENGINE_UNAVAILABLE = 27
    COMMIT_ROLLED_BACK = 28
    COMMIT_FAILED = 29
    INTERNAL = 30
    UNAUTHENTICATED = 31
    PERMISSION_DENIED = 32


class WeightSyncError(Exception):
    """Base of all errors of this project.

    Attributes:
        reason: Why, for programs.
        subjects: The things concerned: field paths for `InvalidRequestError`, tensor names for
            `IncompleteError`, ...
        retry_after: Seconds after which another try makes sense, if one does.
        metadata: Further facts by name, e.g. `holder` of a busy target.
    """

    reason: ClassVar[Reason] = Reason.INTERNAL
    _by_reason: ClassVar[dict[Reason, type[WeightSyncError]]] = {}

    def __init__(
        self,
        message: str,
        *,
        subjects: Sequence[str] = (),
        retry_after: float | None = None,
        **metadata: str,
    ) -> None:
        """Make an error with a text for people and facts for programs."""
        super().__init__(message)
        self.subjects = tuple(subjects)
        self.retry_after = retry_after
        self.metadata = metadata

    def __init_subclass__(cls) -> None:
        """Register the class of a reason; one without a reason of its own never travels."""
        super().__init_subclass__()
        if "reason" in cls.__dict__:
            WeightSyncError._by_reason[cls.reason] = cls

    @staticmethod
    def class_for(reason: Reason) -> type[WeightSyncError]:
        """Return the class that stands for a reason."""
        return WeightSyncError._by_reason.get(reason, WeightSyncError)


class InvalidRequestError(WeightSyncError):
    """A field is missing, unknown or out of its range."""

    reason = Reason.INVALID_REQUEST


class ShapeMismatchError(WeightSyncError):
    """The global shape is not the worker's."""

    reason = Reason.SHAPE_MISMATCH


class DTypeMismatchError(WeightSyncError):
    """The element type is not the worker's, and is not cast."""

    reason = Reason.DTYPE_MISMATCH


class OutOfBoundsError(WeightSyncError):
    """A region or a byte range reaches outside its tensor."""

    reason = Reason.OUT_OF_BOUNDS


class MalformedPayloadError(WeightSyncError):
    """A payload is shorter or longer than its segments say, or no message at all."""

    reason = Reason.MALFORMED_PAYLOAD


class OverlapConflictError(WeightSyncError):
    """Bytes that were written twice differ."""

    reason = Reason.OVERLAP_CONFLICT


class UnknownTensorError(WeightSyncError):
    """The target has no tensor of that name."""

    reason = Reason.UNKNOWN_TENSOR


class UnknownSessionError(WeightSyncError):
    """No session of that id."""

    reason = Reason.UNKNOWN_SESSION


class TargetAbsentError(WeightSyncError):
    """The worker does not have that target, or it has no weights."""

    reason = Reason.TARGET_ABSENT


class UnsupportedError(WeightSyncError):
    """The engine, the encoding, the transport or the control can't do that."""

    reason = Reason.UNSUPPORTED


class RequestIdReusedError(WeightSyncError):
    """A request id came again with another request."""

    reason = Reason.REQUEST_ID_REUSED


class TargetBusyError(WeightSyncError):
    """Another session holds the target; metadata: `holder`, `session_id`, `expire_time`."""

    reason = Reason.TARGET_BUSY


class BaseVersionMismatchError(WeightSyncError):
    """The target does not hold the expected version."""

    reason = Reason.BASE_VERSION_MISMATCH


class ChecksumMismatchError(WeightSyncError):
    """A payload arrived changed; nothing of it was stored."""

    reason = Reason.CHECKSUM_MISMATCH


class VersionChangedError(WeightSyncError):
    """The weights changed while they were read."""

    reason = Reason.VERSION_CHANGED


class IncompleteError(WeightSyncError):
    """Elements are missing; `subjects` names the first ten tensors, metadata `missing` counts."""

    reason = Reason.INCOMPLETE


class NothingAppliedError(WeightSyncError):
    """Nothing was written in a PARTIAL session."""

    reason = Reason.NOTHING_APPLIED


class SessionStateError(WeightSyncError):
    """The session is not in a state that allows the call; metadata: `state`."""

    reason = Reason.SESSION_STATE


class SessionExpiredError(WeightSyncError):
    """The session's lease ran out."""

    reason = Reason.SESSION_EXPIRED


class SharedWeightError(WeightSyncError):
    """The tensor is one storage with the verifier's, and the policy protects it."""

    reason = Reason.SHARED_WEIGHT


class NotFiniteError(WeightSyncError):
    """A tensor holds NaN or infinity and the session asked for a check."""

    reason = Reason.NOT_FINITE


class StreamsOpenError(WeightSyncError):
    """Streams of the session are still open."""

    reason = Reason.STREAMS_OPEN


class QuarantinedError(WeightSyncError):
    """The target's content is not known to be one whole version."""

    reason = Reason.QUARANTINED


class ArenaFullError(WeightSyncError):
    """The staging arena has no room."""

    reason = Reason.ARENA_FULL


class TooManyStreamsError(WeightSyncError):
    """Too many streams or watchers are open."""

    reason = Reason.TOO_MANY_STREAMS


class DrainingError(WeightSyncError):
    """The worker is stopping."""

    reason = Reason.DRAINING


class EngineUnavailableError(WeightSyncError):
    """The engine sleeps, or did not reach a step boundary in time."""

    reason = Reason.ENGINE_UNAVAILABLE


class CommitRolledBackError(WeightSyncError):
    """The commit failed and the old version was restored."""

    reason = Reason.COMMIT_ROLLED_BACK


class CommitFailedError(WeightSyncError):
    """The commit failed and the target is quarantined."""

    reason = Reason.COMMIT_FAILED


class InternalError(WeightSyncError):
    """A fault of this project; metadata: `correlation_id`, which finds it in the log."""

    reason = Reason.INTERNAL


class UnauthenticatedError(WeightSyncError):
    """The worker wants a token, and got none, or one that it does not know."""

    reason = Reason.UNAUTHENTICATED


class PermissionDeniedError(WeightSyncError):
    """The caller may not do that; metadata: `scope`, which is missing."""

    reason = Reason.PERMISSION_DENIED
