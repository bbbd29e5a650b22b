"""Errors to google.rpc.Status and back: the one table from reason to status code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import (
    BadRequest,
    ErrorInfo,
    PreconditionFailure,
    ResourceInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status

from weightsync.core.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    PermissionDeniedError,
    Reason,
    UnauthenticatedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.wire.convert import duration_from_proto, duration_to_proto

M = TypeVar("M", bound=Message)

DOMAIN = "weightsync.v1"

CODES: Mapping[Reason, int] = {
    Reason.INVALID_REQUEST: Code.INVALID_ARGUMENT,
    Reason.SHAPE_MISMATCH: Code.INVALID_ARGUMENT,
    Reason.DTYPE_MISMATCH: Code.INVALID_ARGUMENT,
    Reason.OUT_OF_BOUNDS: Code.INVALID_ARGUMENT,
    Reason.MALFORMED_PAYLOAD: Code.INVALID_ARGUMENT,
    Reason.OVERLAP_CONFLICT: Code.INVALID_ARGUMENT,
    Reason.UNKNOWN_TENSOR: Code.NOT_FOUND,
    Reason.UNKNOWN_SESSION: Code.NOT_FOUND,
    Reason.TARGET_ABSENT: Code.UNIMPLEMENTED,
    Reason.UNSUPPORTED: Code.UNIMPLEMENTED,
    Reason.REQUEST_ID_REUSED: Code.ALREADY_EXISTS,
    Reason.TARGET_BUSY: Code.ABORTED,
    Reason.BASE_VERSION_MISMATCH: Code.ABORTED,
    Reason.CHECKSUM_MISMATCH: Code.ABORTED,
    Reason.VERSION_CHANGED: Code.ABORTED,
    Reason.INCOMPLETE: Code.FAILED_PRECONDITION,
    Reason.NOTHING_APPLIED: Code.FAILED_PRECONDITION,
    Reason.SESSION_STATE: Code.FAILED_PRECONDITION,
    Reason.SESSION_EXPIRED: Code.FAILED_PRECONDITION,
    Reason.SHARED_WEIGHT: Code.FAILED_PRECONDITION,
    Reason.NOT_FINITE: Code.FAILED_PRECONDITION,
    Reason.STREAMS_OPEN: Code.FAILED_PRECONDITION,
    Reason.QUARANTINED: Code.FAILED_PRECONDITION,
    Reason.ARENA_FULL: Code.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_STREAMS: Code.RESOURCE_EXHAUSTED,
    Reason.DRAINING: Code.UNAVAILABLE,
    Reason.ENGINE_UNAVAILABLE: Code.UNAVAILABLE,
    Reason.COMMIT_ROLLED_BACK: Code.INTERNAL,
    Reason.COMMIT_FAILED: Code.DATA_LOSS,
    Reason.INTERNAL: Code.INTERNAL,
    Reason.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: Code.PERMISSION_DENIED,
}
"""Status code of each reason, as a number of google.rpc.Code."""

# What a ResourceInfo is about, where it is not a tensor.
_RESOURCE_TYPES = {
    Reason.UNKNOWN_SESSION: "session",
    Reason.REQUEST_ID_REUSED: "session",
    Reason.TARGET_ABSENT: "target",
    Reason.TARGET_BUSY: "target",
    Reason.BASE_VERSION_MISMATCH: "target",
    Reason.VERSION_CHANGED: "target",
}

# What a bare status code most likely means, as gRPC itself or a proxy gives it.
_CLASS_OF_BARE_CODE: Mapping[int, type[WeightSyncError]] = {
    Code.INVALID_ARGUMENT: InvalidRequestError,
    Code.UNIMPLEMENTED: UnsupportedError,
    Code.UNAVAILABLE: EngineUnavailableError,
    Code.UNAUTHENTICATED: UnauthenticatedError,
    Code.PERMISSION_DENIED: PermissionDeniedError,
}

# Details travel in trailers, of which gRPC takes 8 KiB. The text travels twice, once of these in
# percent coding.
_LONGEST_TEXT = 512
_LONGEST_FACT = 128
_MOST_FACTS = 5
_MOST_SUBJECTS = 10


def status_of(error: WeightSyncError) -> Status:
    """Return the status of an error; texts too long for trailers are cut in their middle."""
    text = _shorten(str(error), _LONGEST_TEXT)
    info = ErrorInfo(
        reason=error.reason.name,
        domain=DOMAIN,
        metadata={
            _shorten(key, _LONGEST_FACT): _shorten(value, _LONGEST_FACT)
            for key, value in list(error.metadata.items())[:_MOST_FACTS]
        },
    )
    details: list[Message] = [info]
    if error.retry_after is not None:
        delay = duration_to_proto(error.retry_after)
        details.append(RetryInfo(retry_delay=delay))
    subjects = [_shorten(subject, _LONGEST_FACT) for subject in error.subjects[:_MOST_SUBJECTS]]
    details += _subjects_to_details(error.reason, subjects)
    status = Status(code=CODES[error.reason], message=text)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def error_of(status: Status) -> WeightSyncError:
    """Return the error that a peer had; without an ErrorInfo of ours, what its code tells."""
    infos = _unpack(status.details, ErrorInfo)
    info = next((info for info in infos if info.domain == DOMAIN), None)
    # A reason that only newer workers know is as good as none.
    if info is None or info.reason not in Reason.__members__:
        return error_of_code(status.code, status.message)
    delays = _unpack(status.details, RetryInfo)
    error = WeightSyncError.class_for(Reason[info.reason])(
        status.message,
        subjects=_subjects_of_details(status.details),
        retry_after=duration_from_proto(delays[0].retry_delay) if delays else None,
    )
    # Not as keywords: a peer chooses their names.
    error.metadata = dict(info.metadata)
    return error


def error_of_code(code: int, details: str) -> WeightSyncError:
    """Return the error for a status without details, e.g. a lost connection.

    Args:
        code: A number of google.rpc.Code.
        details: The text that came with it.

    Returns:
        The nearest class, or `WeightSyncError` itself (e.g. for CANCELLED and DEADLINE_EXCEEDED);
        metadata `code` has the code's name.
    """
    name = Code.Name(code) if code in Code.values() else str(code)
    kind = _CLASS_OF_BARE_CODE.get(code, WeightSyncError)
    return kind(f"{name}: {details}", code=name)


def _subjects_to_details(reason: Reason, subjects: Sequence[str]) -> list[Message]:
    if not subjects:
        return []
    if reason is Reason.INVALID_REQUEST:
        violations = [BadRequest.FieldViolation(field=s) for s in subjects]
        return [BadRequest(field_violations=violations)]
    if CODES[reason] == Code.FAILED_PRECONDITION:
        kind = "MISSING" if reason is Reason.INCOMPLETE else reason.name
        failures = [PreconditionFailure.Violation(type=kind, subject=s) for s in subjects]
        return [PreconditionFailure(violations=failures)]
    kind = _RESOURCE_TYPES.get(reason, "tensor")
    return [ResourceInfo(resource_type=kind, resource_name=s) for s in subjects]


def _subjects_of_details(details: Sequence[Any]) -> list[str]:
    bad = _unpack(details, BadRequest)
    failed = _unpack(details, PreconditionFailure)
    resources = _unpack(details, ResourceInfo)
    return [
        *(violation.field for request in bad for violation in request.field_violations),
        *(violation.subject for failure in failed for violation in failure.violations),
        *(resource.resource_name for resource in resources),
    ]


def _unpack(details: Sequence[Any], kind: type[M]) -> list[M]:
    """Return the details of one kind; what can't be read is left out: the error is what counts."""
    found = []
    for detail in details:
        message = kind()
        with suppress(DecodeError):
            if detail.Unpack(message):
                found.append(message)
    return found


def _shorten(text: str, longest: int) -> str:
    """Cut the middle out, where it hurts least: the end of a text has the remedy."""
    raw = text.encode(errors="replace")
    if len(raw) <= longest:
        return raw.decode()
    half = (longest - len("…".encode())) // 2
    return raw[:half].decode(errors="ignore") + "…" + raw[-half:].decode(errors="ignore")
