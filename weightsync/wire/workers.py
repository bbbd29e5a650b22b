"""What GetWorker tells of a worker, in both directions."""

from __future__ import annotations

from weightsync.core.dtypes import DType
from weightsync.core.types import (
    ChecksumType,
    Coordinates,
    Encoding,
    Limits,
    Transport,
    UpdateMode,
)
from weightsync.core.views import WorkerInfo
from weightsync.v1 import types_pb2, weight_sync_pb2
from weightsync.wire.answers import target_status_from_proto, target_status_to_proto
from weightsync.wire.convert import duration_from_proto, duration_to_proto


def worker_to_proto(worker: WorkerInfo) -> weight_sync_pb2.GetWorkerResponse:
    """Return the message of a worker."""
    return weight_sync_pb2.GetWorkerResponse(
        instance_id=worker.instance_id,
        engine=worker.engine,
        engine_version=worker.engine_version,
        server_version=worker.server_version,
        coordinates=_coordinates_to_proto(worker.coordinates),
        targets=map(target_status_to_proto, worker.targets),
        limits=_limits_to_proto(worker.limits),
        capabilities=weight_sync_pb2.Capabilities(
            transports=[types_pb2.Transport.ValueType(t.value) for t in worker.transports],
            encodings=[types_pb2.Encoding.ValueType(e.value) for e in Encoding],
            checksums=[types_pb2.ChecksumType.ValueType(c.value) for c in ChecksumType],
            modes=[types_pb2.UpdateMode.ValueType(m.value) for m in worker.modes],
            dtypes=[types_pb2.DataType.ValueType(d.value) for d in DType],
            controls=worker.controls,
            shared_memory_socket=worker.shared_memory_socket,
        ),
    )


def worker_from_proto(message: weight_sync_pb2.GetWorkerResponse) -> WorkerInfo:
    """Return the worker of a message.

    Modes and transports that only a newer worker knows are left out: nobody here can ask for
    them. Limits that do not concern a caller have their defaults.
    """
    modes = {mode.value: mode for mode in UpdateMode}
    transports = {transport.value: transport for transport in Transport}
    capabilities = message.capabilities
    return WorkerInfo(
        instance_id=message.instance_id,
        engine=message.engine,
        engine_version=message.engine_version,
        server_version=message.server_version,
        coordinates=_coordinates_from_proto(message.coordinates),
        targets=tuple(map(target_status_from_proto, message.targets)),
        limits=_limits_from_proto(message.limits),
        modes=tuple(modes[value] for value in capabilities.modes if value in modes),
        controls=tuple(capabilities.controls),
        transports=tuple(
            transports[value] for value in capabilities.transports if value in transports
        ),
        shared_memory_socket=capabilities.shared_memory_socket,
    )


def _coordinates_to_proto(coordinates: Coordinates) -> weight_sync_pb2.Coordinates:
    return weight_sync_pb2.Coordinates(
        rank=coordinates.rank,
        world_size=coordinates.world_size,
        tp_rank=coordinates.tp_rank,
        tp_size=coordinates.tp_size,
        pp_rank=coordinates.pp_rank,
        pp_size=coordinates.pp_size,
        dp_rank=coordinates.dp_rank,
        dp_size=coordinates.dp_size,
    )


def _coordinates_from_proto(message: weight_sync_pb2.Coordinates) -> Coordinates:
    return Coordinates(
        rank=message.rank,
        world_size=message.world_size,
        tp_rank=message.tp_rank,
        tp_size=message.tp_size,
        pp_rank=message.pp_rank,
        pp_size=message.pp_size,
        dp_rank=message.dp_rank,
        dp_size=message.dp_size,
    )


def _limits_to_proto(limits: Limits) -> types_pb2.Limits:
    return types_pb2.Limits(
        max_message_bytes=limits.max_message_bytes,
        max_name_bytes=limits.max_name_bytes,
        max_segments=limits.max_segments,
        max_streams=limits.max_streams,
        max_arena_bytes=limits.max_arena_bytes,
        max_lease=duration_to_proto(limits.max_lease),
        max_dims=limits.max_dims,
        max_names=limits.max_names,
        max_sessions=limits.max_sessions,
        max_watchers=limits.max_watchers,
        max_readers=limits.max_readers,
    )


def _limits_from_proto(message: types_pb2.Limits) -> Limits:
    return Limits(
        max_message_bytes=message.max_message_bytes,
        max_name_bytes=message.max_name_bytes,
        max_segments=message.max_segments,
        max_streams=message.max_streams,
        max_arena_bytes=message.max_arena_bytes,
        max_lease=duration_from_proto(message.max_lease),
        max_dims=message.max_dims,
        max_names=message.max_names,
        max_sessions=message.max_sessions,
        max_watchers=message.max_watchers,
        max_readers=message.max_readers,
    )
