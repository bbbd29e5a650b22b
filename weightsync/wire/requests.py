"""What StartWeightUpdate asks for, in both directions."""

from __future__ import annotations

import math
from typing import Literal

from weightsync.core.errors import InvalidRequestError, UnsupportedError
from weightsync.core.types import (
    CastPolicy,
    Limits,
    Scope,
    SharedTensorPolicy,
    Target,
    Transport,
    UpdateMode,
    UpdateRequest,
)
from weightsync.v1 import types_pb2
from weightsync.v1.weight_sync_pb2 import BaseVersion, StartWeightUpdateRequest
from weightsync.wire.convert import (
    duration_from_proto,
    duration_to_proto,
    enum_from_proto,
    targets_from_proto,
    targets_to_proto,
)


def update_request_to_proto(request: UpdateRequest) -> StartWeightUpdateRequest:
    """Return the message of a request.

    Raises:
        InvalidRequestError: the lease is not a positive number.
    """
    message = StartWeightUpdateRequest(
        request_id=request.request_id,
        targets=targets_to_proto(request.targets),
        scope=types_pb2.Scope.ValueType(request.scope.value),
        weight_version=request.weight_version,
        expected_base_versions=[
            BaseVersion(
                target=types_pb2.Target.ValueType(target.value), weight_version=weight_version
            )
            for target, weight_version in request.expected_base_versions
        ],
        mode=types_pb2.UpdateMode.ValueType(request.mode.value),
        transports=[types_pb2.Transport.ValueType(t.value) for t in request.transports],
        shared_tensors=types_pb2.SharedTensorPolicy.ValueType(request.shared_tensors.value),
        cast=types_pb2.CastPolicy.ValueType(request.cast.value),
        ignore_names=request.ignore_names,
        check_finite=request.check_finite,
        holder=request.holder,
        shared_memory_id=request.shared_memory_id,
    )
    if request.lease is not None:
        message.lease.CopyFrom(duration_to_proto(_checked_lease(request.lease, "lease")))
    if request.prepared_lease is not None:
        seconds = _checked_lease(request.prepared_lease, "prepared_lease")
        message.prepared_lease.CopyFrom(duration_to_proto(seconds))
    return message


def update_request_from_proto(message: StartWeightUpdateRequest, limits: Limits) -> UpdateRequest:
    """Return the request of a message.

    Raises:
        InvalidRequestError: a field is missing, unknown or over a limit; subjects name it.
        UnsupportedError: of the caller's transports this version knows none.
    """
    targets = targets_from_proto(message.targets, "targets")
    if not targets:
        raise InvalidRequestError(
            "targets is empty; say which models the session writes: VERIFIER, DRAFT or both",
            subjects=["targets"],
        )
    if not message.weight_version:
        raise InvalidRequestError(
            "weight_version is empty; give what the targets will hold a name",
            subjects=["weight_version"],
        )
    for field in ("request_id", "weight_version", "holder", "shared_memory_id"):
        _check_text(getattr(message, field), field, limits)
    check_count(len(message.ignore_names), "ignore_names", limits)
    for index, pattern in enumerate(message.ignore_names):
        _check_text(pattern, f"ignore_names[{index}]", limits)
    return UpdateRequest(
        targets=targets,
        scope=enum_from_proto(Scope, message.scope, "scope"),
        weight_version=message.weight_version,
        request_id=message.request_id,
        expected_base_versions=_base_versions(message),
        mode=enum_from_proto(UpdateMode, message.mode, "mode", default=UpdateMode.STAGED),
        transports=_transports(message),
        lease=_lease(message, "lease"),
        prepared_lease=_lease(message, "prepared_lease"),
        shared_tensors=enum_from_proto(
            SharedTensorPolicy,
            message.shared_tensors,
            "shared_tensors",
            default=SharedTensorPolicy.REFUSE,
        ),
        cast=enum_from_proto(CastPolicy, message.cast, "cast", default=CastPolicy.REFUSE),
        ignore_names=tuple(message.ignore_names),
        check_finite=message.check_finite,
        holder=message.holder,
        shared_memory_id=message.shared_memory_id,
    )


def _base_versions(message: StartWeightUpdateRequest) -> tuple[tuple[Target, str], ...]:
    found: dict[Target, str] = {}
    for index, base in enumerate(message.expected_base_versions):
        field = f"expected_base_versions[{index}].target"
        target = enum_from_proto(Target, base.target, field)
        if target in found:
            raise InvalidRequestError(
                f"{field} names {target} a second time; name each target once", subjects=[field]
            )
        found[target] = base.weight_version
    return tuple(found.items())


def _transports(message: StartWeightUpdateRequest) -> tuple[Transport, ...]:
    if not message.transports:
        return (Transport.INLINE,)
    for index, value in enumerate(message.transports):
        if value == types_pb2.TRANSPORT_UNSPECIFIED:
            field = f"transports[{index}]"
            raise InvalidRequestError(f"{field} is not set", subjects=[field])
    # A newer client may offer what this version does not know, and fall back to what it does.
    words = {transport.value: transport for transport in Transport}
    known = tuple(words[value] for value in message.transports if value in words)
    if not known:
        raise UnsupportedError(
            f"none of the transports {list(message.transports)} is known here; offer "
            f"{', '.join(transport.name for transport in Transport)}"
        )
    return known


def _lease(
    message: StartWeightUpdateRequest, field: Literal["lease", "prepared_lease"]
) -> float | None:
    if not message.HasField(field):
        return None
    return _checked_lease(duration_from_proto(getattr(message, field)), field)


def _checked_lease(seconds: float, field: str) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequestError(
            f"{field} is {seconds} seconds; it must be positive, or left out", subjects=[field]
        )
    return seconds


def check_count(count: int, field: str, limits: Limits) -> None:
    """Refuse more names than a request may have.

    Raises:
        InvalidRequestError: there are more.
    """
    if count > limits.max_names:
        raise InvalidRequestError(
            f"{field} has {count} entries; at most {limits.max_names} are taken in one request",
            subjects=[field],
        )


def _check_text(text: str, field: str, limits: Limits) -> None:
    length = len(text.encode())
    if length > limits.max_name_bytes:
        raise InvalidRequestError(
            f"{field} has {length} bytes; at most {limits.max_name_bytes} are taken",
            subjects=[field],
        )
