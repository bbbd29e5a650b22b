"""Errors to google.rpc.Status and back: the one table from reason to status code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2
from google.rpc.status_pb2 import Status

from weightsync.core.errors import Reason, WeightSyncError
from weightsync.wire.convert import duration_from_proto, duration_to_proto

M = TypeVar("M", bound=Message)

DOMAIN = "weightsync.v1"

CODES: Mapping[Reason, int] = {
    Reason.INVALID_REQUEST: code_pb2.INVALID_ARGUMENT,
    Reason.SHAPE_MISMATCH: code_pb2.INVALID_ARGUMENT,
    Reason.DTYPE_MISMATCH: code_pb2.INVALID_ARGUMENT,
    Reason.OUT_OF_BOUNDS: code_pb2.INVALID_ARGUMENT,
    Reason.MALFORMED_PAYLOAD: code_pb2.INVALID_ARGUMENT,
    Reason.OVERLAP_CONFLICT: code_pb2.INVALID_ARGUMENT,
    Reason.UNKNOWN_TENSOR: code_pb2.NOT_FOUND,
    Reason.UNKNOWN_SESSION: code_pb2.NOT_FOUND,
    Reason.TARGET_ABSENT: code_pb2.UNIMPLEMENTED,
    Reason.UNSUPPORTED: code_pb2.UNIMPLEMENTED,
    Reason.REQUEST_ID_REUSED: code_pb2.ALREADY_EXISTS,
    Reason.TARGET_BUSY: code_pb2.ABORTED,
    Reason.BASE_VERSION_MISMATCH: code_pb2.ABORTED,
    Reason.CHECKSUM_MISMATCH: code_pb2.ABORTED,
    Reason.VERSION_CHANGED: code_pb2.ABORTED,
    Reason.INCOMPLETE: code_pb2.FAILED_PRECONDITION,
    Reason.NOTHING_APPLIED: code_pb2.FAILED_PRECONDITION,
    Reason.SESSION_STATE: code_pb2.FAILED_PRECONDITION,
    Reason.SESSION_EXPIRED: code_pb2.FAILED_PRECONDITION,
    Reason.SHARED_WEIGHT: code_pb2.FAILED_PRECONDITION,
    Reason.NOT_FINITE: code_pb2.FAILED_PRECONDITION,
    Reason.STREAMS_OPEN: code_pb2.FAILED_PRECONDITION,
    Reason.QUARANTINED: code_pb2.FAILED_PRECONDITION,
    Reason.ARENA_FULL: code_pb2.RESOURCE_EXHAUSTED,
    Reason.TOO_MANY_STREAMS: code_pb2.RESOURCE_EXHAUSTED,
    Reason.DRAINING: code_pb2.UNAVAILABLE,
    Reason.ENGINE_UNAVAILABLE: code_pb2.UNAVAILABLE,
    Reason.COMMIT_ROLLED_BACK: code_pb2.INTERNAL,
    Reason.COMMIT_FAILED: code_pb2.DATA_LOSS,
    Reason.INTERNAL: code_pb2.INTERNAL,
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

# Reasons that stand for a bare status code, as gRPC itself or a proxy gives it.
_REASON_OF_BARE_CODE = {
    code_pb2.INVALID_ARGUMENT: Reason.INVALID_REQUEST,
    code_pb2.UNIMPLEMENTED: Reason.UNSUPPORTED,
    code_pb2.UNAVAILABLE: Reason.ENGINE_UNAVAILABLE,
    code_pb2.DATA_LOSS: Reason.COMMIT_FAILED,
}

# Details travel in trailers, of which gRPC takes 8 KiB. The text travels twice, once of these in
# percent coding.
_LONGEST_TEXT = 512
_LONGEST_FACT = 128
_MOST_FACTS = 10


def status_of(error: WeightSyncError) -> Status:
    """Return the status of an error; texts too long for trailers are cut in their middle."""
    text = _shorten(str(error), _LONGEST_TEXT)
    info = error_details_pb2.ErrorInfo(
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
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    subjects = [_shorten(subject, _LONGEST_FACT) for subject in error.subjects[:_MOST_FACTS]]
    details += _subjects_to_details(error.reason, subjects)
    status = Status(code=CODES[error.reason], message=text)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def error_of(status: Status) -> WeightSyncError:
    """Return the error that a peer had; without an ErrorInfo of ours, what its code tells."""
    infos = _unpack(status.details, error_details_pb2.ErrorInfo)
    info = next((info for info in infos if info.domain == DOMAIN), None)
    # A reason that only newer workers know is as good as none.
    if info is None or info.reason not in Reason.__members__:
        return error_of_code(status.code, status.message)
    delays = _unpack(status.details, error_details_pb2.RetryInfo)
    return WeightSyncError.class_for(Reason[info.reason])(
        status.message,
        subjects=_subjects_of_details(status.details),
        retry_after=duration_from_proto(delays[0].retry_delay) if delays else None,
        **info.metadata,
    )


def error_of_code(code: int, details: str) -> WeightSyncError:
    """Return the error for a status without details, e.g. a lost connection.

    Args:
        code: A number of google.rpc.Code.
        details: The text that came with it.

    Returns:
        The nearest class, or `WeightSyncError` itself (e.g. for CANCELLED and DEADLINE_EXCEEDED);
        metadata `code` has the code's name.
    """
    known = code_pb2.Code.values()
    name = code_pb2.Code.Name(code_pb2.Code.ValueType(code)) if code in known else str(code)
    reason = _REASON_OF_BARE_CODE.get(code, Reason.INTERNAL)
    kind = WeightSyncError if reason is Reason.INTERNAL else WeightSyncError.class_for(reason)
    return kind(f"{name}: {details}", code=name)


def _subjects_to_details(reason: Reason, subjects: Sequence[str]) -> list[Message]:
    if not subjects:
        return []
    if reason is Reason.INVALID_REQUEST:
        violations = [error_details_pb2.BadRequest.FieldViolation(field=s) for s in subjects]
        return [error_details_pb2.BadRequest(field_violations=violations)]
    if CODES[reason] == code_pb2.FAILED_PRECONDITION:
        kind = "MISSING" if reason is Reason.INCOMPLETE else reason.name
        failures = [
            error_details_pb2.PreconditionFailure.Violation(type=kind, subject=s) for s in subjects
        ]
        return [error_details_pb2.PreconditionFailure(violations=failures)]
    kind = _RESOURCE_TYPES.get(reason, "tensor")
    return [error_details_pb2.ResourceInfo(resource_type=kind, resource_name=s) for s in subjects]


def _subjects_of_details(details: Sequence[Any]) -> list[str]:
    bad = _unpack(details, error_details_pb2.BadRequest)
    failed = _unpack(details, error_details_pb2.PreconditionFailure)
    resources = _unpack(details, error_details_pb2.ResourceInfo)
    return [
        *(violation.field for request in bad for violation in request.field_violations),
        *(violation.subject for failure in failed for violation in failure.violations),
        *(resource.resource_name for resource in resources),
    ]


def _unpack(details: Sequence[Any], kind: type[M]) -> list[M]:
    found = []
    for detail in details:
        message = kind()
        if detail.Is(kind.DESCRIPTOR) and detail.Unpack(message):
            found.append(message)
    return found


def _shorten(text: str, longest: int) -> str:
    """Cut the middle out, where it hurts least: the end of a text has the remedy."""
    raw = text.encode(errors="replace")
    if len(raw) <= longest:
        return raw.decode()
    half = (longest - len("…".encode())) // 2
    return raw[:half].decode(errors="ignore") + "…" + raw[-half:].decode(errors="ignore")
