"""What a worker tells of sessions, targets, tensors and events, in both directions.

A client reads answers with the same care with which a worker reads requests: a state that only a
newer worker knows is an error that names the field, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.core.dtypes import DType
from weightsync.core.errors import MalformedPayloadError, OutOfBoundsError
from weightsync.core.names import shorten
from weightsync.core.regions import Region
from weightsync.core.types import (
    CacheReset,
    Scope,
    SessionState,
    Target,
    TargetState,
    Transport,
    UpdateMode,
)
from weightsync.core.views import (
    CommitReport,
    Event,
    EventKind,
    MissingTensor,
    PlacedPart,
    PrepareReport,
    SessionInfo,
    StreamReport,
    TargetStatus,
    TensorDigest,
    TensorInfo,
    TensorPlacement,
)
from weightsync.v1 import types_pb2, weight_sync_pb2
from weightsync.wire.convert import (
    duration_from_proto,
    duration_to_proto,
    enum_from_proto,
    region_from_proto,
    region_to_proto,
    targets_from_proto,
    targets_to_proto,
    time_from_proto,
    time_to_proto,
)


def session_to_proto(session: SessionInfo) -> types_pb2.Session:
    """Return the message of a session."""
    return types_pb2.Session(
        session_id=session.session_id,
        state=types_pb2.SessionState.ValueType(session.state.value),
        targets=targets_to_proto(session.targets),
        scope=types_pb2.Scope.ValueType(session.scope.value),
        mode=types_pb2.UpdateMode.ValueType(session.mode.value),
        weight_version=session.weight_version,
        holder=session.holder,
        transport=types_pb2.Transport.ValueType(session.transport.value),
        create_time=time_to_proto(session.create_time),
        expire_time=time_to_proto(session.expire_time),
        received_bytes=session.received_bytes,
        missing_bytes=session.missing_bytes,
        end_reason=session.end_reason,
    )


def session_from_proto(message: types_pb2.Session) -> SessionInfo:
    """Return the session of a message."""
    return SessionInfo(
        session_id=message.session_id,
        state=enum_from_proto(SessionState, message.state, "session.state"),
        targets=targets_from_proto(message.targets, "session.targets"),
        scope=enum_from_proto(Scope, message.scope, "session.scope"),
        mode=enum_from_proto(UpdateMode, message.mode, "session.mode"),
        weight_version=message.weight_version,
        holder=message.holder,
        transport=enum_from_proto(Transport, message.transport, "session.transport"),
        create_time=time_from_proto(message.create_time),
        expire_time=time_from_proto(message.expire_time),
        received_bytes=message.received_bytes,
        missing_bytes=message.missing_bytes,
        end_reason=message.end_reason,
    )


def target_status_to_proto(status: TargetStatus) -> types_pb2.TargetStatus:
    """Return the message of a target's status; no commit time before the first commit."""
    committed = status.last_commit_time
    return types_pb2.TargetStatus(
        target=types_pb2.Target.ValueType(status.target.value),
        state=types_pb2.TargetState.ValueType(status.state.value),
        weight_version=status.weight_version,
        num_tensors=status.num_tensors,
        num_bytes=status.num_bytes,
        num_unwritten=status.num_unwritten,
        num_commits=status.num_commits,
        session_id=status.session_id,
        quarantine_reason=status.quarantine_reason,
        last_commit_time=time_to_proto(committed) if committed else None,
    )


def target_status_from_proto(message: types_pb2.TargetStatus) -> TargetStatus:
    """Return the target's status of a message."""
    return TargetStatus(
        target=enum_from_proto(Target, message.target, "target"),
        state=enum_from_proto(TargetState, message.state, "state"),
        weight_version=message.weight_version,
        num_tensors=message.num_tensors,
        num_bytes=message.num_bytes,
        num_unwritten=message.num_unwritten,
        num_commits=message.num_commits,
        session_id=message.session_id,
        quarantine_reason=message.quarantine_reason,
        last_commit_time=time_from_proto(message.last_commit_time),
    )


def _region(message: types_pb2.Region, name: str) -> Region:
    region = region_from_proto(message)
    if len(region.offsets) != len(region.sizes):
        raise MalformedPayloadError(
            f"the worker tells of a region of tensor {shorten(name)!r} with"
            f" {len(region.offsets)} offsets and {len(region.sizes)} sizes",
            subjects=[name],
        )
    return region


def _inside(message: types_pb2.Region, shape: Sequence[int], name: str) -> Region:
    region = _region(message, name)
    if not region.fits(shape):
        raise OutOfBoundsError(
            f"the worker tells of a region that reaches outside its tensor {shorten(name)!r}",
            subjects=[name],
        )
    return region


def tensor_info_to_proto(tensor: TensorInfo) -> types_pb2.TensorInfo:
    """Return the message of a tensor."""
    return types_pb2.TensorInfo(
        target=types_pb2.Target.ValueType(tensor.target.value),
        name=tensor.name,
        dtype=types_pb2.DataType.ValueType(tensor.dtype.value),
        shape=tensor.shape,
        regions=map(region_to_proto, tensor.regions),
        share_group=tensor.share_group,
        written=tensor.written,
        composite=tensor.composite,
        reloaded=tensor.reloaded,
    )


def tensor_info_from_proto(message: types_pb2.TensorInfo) -> TensorInfo:
    """Return the tensor of a message.

    Raises:
        OutOfBoundsError: a region reaches outside of it.
    """
    return TensorInfo(
        target=enum_from_proto(Target, message.target, "target"),
        name=message.name,
        dtype=enum_from_proto(DType, message.dtype, "dtype"),
        shape=tuple(message.shape),
        regions=tuple(_inside(region, message.shape, message.name) for region in message.regions),
        share_group=message.share_group,
        written=message.written,
        composite=message.composite,
        reloaded=message.reloaded,
    )


def placement_to_proto(tensor: TensorPlacement) -> weight_sync_pb2.TensorPlacement:
    """Return the message of a tensor in an arena."""
    return weight_sync_pb2.TensorPlacement(
        target=types_pb2.Target.ValueType(tensor.target.value),
        name=tensor.name,
        dtype=types_pb2.DataType.ValueType(tensor.dtype.value),
        shape=tensor.shape,
        placements=[
            weight_sync_pb2.Placement(
                region=region_to_proto(part.region), offset=part.offset, strides=part.strides
            )
            for part in tensor.parts
        ],
    )


def placement_from_proto(message: weight_sync_pb2.TensorPlacement) -> TensorPlacement:
    """Return the tensor in an arena of a message."""
    return TensorPlacement(
        target=enum_from_proto(Target, message.target, "target"),
        name=message.name,
        dtype=enum_from_proto(DType, message.dtype, "dtype"),
        shape=tuple(message.shape),
        parts=tuple(
            PlacedPart(
                _inside(part.region, message.shape, message.name), part.offset, tuple(part.strides)
            )
            for part in message.placements
        ),
    )


def missing_to_proto(missing: MissingTensor) -> weight_sync_pb2.MissingTensor:
    """Return the message of a tensor with missing elements."""
    return weight_sync_pb2.MissingTensor(
        target=types_pb2.Target.ValueType(missing.target.value),
        name=missing.name,
        regions=map(region_to_proto, missing.regions),
        missing_bytes=missing.missing_bytes,
    )


def missing_from_proto(message: weight_sync_pb2.MissingTensor) -> MissingTensor:
    """Return the tensor with missing elements of a message."""
    return MissingTensor(
        target=enum_from_proto(Target, message.target, "target"),
        name=message.name,
        regions=tuple(_region(region, message.name) for region in message.regions),
        missing_bytes=message.missing_bytes,
    )


def stream_report_to_proto(report: StreamReport) -> weight_sync_pb2.UpdateWeightsResponse:
    """Return the message of what one stream brought."""
    return weight_sync_pb2.UpdateWeightsResponse(
        received_bytes=report.received_bytes,
        received_chunks=report.received_chunks,
        applied_tensors=report.applied_tensors,
        ignored_names=report.ignored_names,
        expire_time=time_to_proto(report.expire_time),
    )


def stream_report_from_proto(message: weight_sync_pb2.UpdateWeightsResponse) -> StreamReport:
    """Return what one stream brought."""
    return StreamReport(
        received_bytes=message.received_bytes,
        received_chunks=message.received_chunks,
        applied_tensors=message.applied_tensors,
        ignored_names=tuple(message.ignored_names),
        expire_time=time_from_proto(message.expire_time),
    )


def prepare_to_proto(report: PrepareReport) -> weight_sync_pb2.PrepareWeightUpdateResponse:
    """Return the message of a prepared session."""
    return weight_sync_pb2.PrepareWeightUpdateResponse(
        session=session_to_proto(report.session),
        prepare_duration=duration_to_proto(report.prepare_seconds),
    )


def prepare_from_proto(message: weight_sync_pb2.PrepareWeightUpdateResponse) -> PrepareReport:
    """Return the prepared session of a message."""
    return PrepareReport(
        session=session_from_proto(message.session),
        prepare_seconds=duration_from_proto(message.prepare_duration),
    )


def commit_to_proto(report: CommitReport) -> weight_sync_pb2.FinishWeightUpdateResponse:
    """Return the message of a committed session."""
    return weight_sync_pb2.FinishWeightUpdateResponse(
        session=session_to_proto(report.session),
        targets=map(target_status_to_proto, report.targets),
        applied_tensors=report.applied_tensors,
        applied_bytes=report.applied_bytes,
        ignored_names=report.ignored_names,
        receive_duration=duration_to_proto(report.receive_seconds),
        prepare_duration=duration_to_proto(report.prepare_seconds),
        pause_duration=duration_to_proto(report.pause_seconds),
        checked_share_groups=report.checked_share_groups,
        cache_reset=weight_sync_pb2.CacheReset.ValueType(report.cache_reset.value),
    )


def commit_from_proto(message: weight_sync_pb2.FinishWeightUpdateResponse) -> CommitReport:
    """Return the committed session of a message."""
    return CommitReport(
        session=session_from_proto(message.session),
        targets=tuple(map(target_status_from_proto, message.targets)),
        applied_tensors=message.applied_tensors,
        applied_bytes=message.applied_bytes,
        ignored_names=tuple(message.ignored_names),
        receive_seconds=duration_from_proto(message.receive_duration),
        prepare_seconds=duration_from_proto(message.prepare_duration),
        pause_seconds=duration_from_proto(message.pause_duration),
        checked_share_groups=message.checked_share_groups,
        cache_reset=enum_from_proto(CacheReset, message.cache_reset, "cache_reset"),
    )


def digest_to_proto(digest: TensorDigest) -> weight_sync_pb2.TensorDigest:
    """Return the message of a digest."""
    return weight_sync_pb2.TensorDigest(
        target=types_pb2.Target.ValueType(digest.target.value),
        name=digest.name,
        dtype=types_pb2.DataType.ValueType(digest.dtype.value),
        region=region_to_proto(digest.region),
        xxh3_128=digest.xxh3_128,
        weight_version=digest.weight_version,
    )


def digest_from_proto(message: weight_sync_pb2.TensorDigest) -> TensorDigest:
    """Return the digest of a message."""
    return TensorDigest(
        target=enum_from_proto(Target, message.target, "target"),
        name=message.name,
        dtype=enum_from_proto(DType, message.dtype, "dtype"),
        region=_region(message.region, message.name),
        xxh3_128=message.xxh3_128,
        weight_version=message.weight_version,
    )


def event_to_proto(event: Event) -> weight_sync_pb2.WatchWorkerResponse:
    """Return the message of an event."""
    return weight_sync_pb2.WatchWorkerResponse(
        sequence=event.sequence,
        time=time_to_proto(event.time),
        kind=weight_sync_pb2.WatchWorkerResponse.Kind.ValueType(event.kind.value),
        targets=targets_to_proto(event.targets),
        session_id=event.session_id,
        weight_version=event.weight_version,
        cause=event.cause,
    )


def event_from_proto(message: weight_sync_pb2.WatchWorkerResponse) -> Event:
    """Return the event of a message."""
    return Event(
        sequence=message.sequence,
        time=time_from_proto(message.time),
        kind=enum_from_proto(EventKind, message.kind, "kind"),
        targets=targets_from_proto(message.targets, "targets"),
        session_id=message.session_id,
        weight_version=message.weight_version,
        cause=message.cause,
    )
