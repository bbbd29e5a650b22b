"""The WeightSync service: protobuf in, the worker's own types, protobuf out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from weightsync.core.errors import InvalidRequestError
from weightsync.core.types import ChecksumType, Target
from weightsync.server.access import Access
from weightsync.server.streams import OpenStreams
from weightsync.server.worker import Worker
from weightsync.v1 import weight_sync_pb2 as pb
from weightsync.wire import answers, requests, workers
from weightsync.wire.chunk import parse_chunk, serialize_read_chunk
from weightsync.wire.convert import targets_from_proto
from weightsync.wire.requests import check_count

DEFAULT_PAGE = 100
MAX_PAGE = 1000

BATCH_BYTES = 1 << 20
"""Size from which a message of tensors or digests is sent off."""

M = TypeVar("M", bound=Message)


class WeightSyncService:
    """One method per rpc; what each does and raises is told in the contract."""

    def __init__(self, worker: Worker, streams: OpenStreams, access: Access) -> None:
        """Serve a worker to those who may write what they write."""
        self._worker = worker
        self._streams = streams
        self._access = access

    def get_worker(
        self, _request: pb.GetWorkerRequest, _call: grpc.ServicerContext
    ) -> pb.GetWorkerResponse:
        """Tell who this worker is."""
        return workers.worker_to_proto(self._worker.info())

    def list_tensors(
        self, request: pb.ListTensorsRequest, _call: grpc.ServicerContext
    ) -> Iterator[pb.ListTensorsResponse]:
        """List the tensors, in batches."""
        infos = self._worker.reader.tensors(self._targets(request.targets, "targets"))
        for batch in _batches(map(answers.tensor_info_to_proto, infos)):
            yield pb.ListTensorsResponse(tensors=batch)

    def start_weight_update(
        self, request: pb.StartWeightUpdateRequest, call: grpc.ServicerContext
    ) -> pb.StartWeightUpdateResponse:
        """Open a session."""
        limits = self._worker.limits
        wanted = requests.update_request_from_proto(request, limits)
        caller = self._access.caller(call)
        caller.require_targets(wanted.targets)
        session = self._worker.start(replace(wanted, holder=caller.as_holder(wanted.holder)))
        return pb.StartWeightUpdateResponse(
            session=answers.session_to_proto(session),
            instance_id=self._worker.instance_id,
            max_payload_bytes=limits.max_payload_bytes,
        )

    def list_placements(
        self, request: pb.ListPlacementsRequest, call: grpc.ServicerContext
    ) -> Iterator[pb.ListPlacementsResponse]:
        """Tell where tensors lie in a shared arena, in batches."""
        self._check_writer(call, request.session_id)
        placements = self._worker.placements(request.session_id, request.shared_memory_id)
        for batch in _batches(map(answers.placement_to_proto, placements)):
            yield pb.ListPlacementsResponse(tensors=batch)

    def update_weights(
        self, messages: Iterator[bytes], call: grpc.ServicerContext
    ) -> pb.UpdateWeightsResponse:
        """Take chunks, one after the other: a slow worker slows its senders down."""
        chunks = (parse_chunk(data, self._worker.limits) for data in messages)
        with self._streams.nameless(call):
            chunk = next(chunks, None)
        session_id = chunk.session_id if chunk else ""
        if chunk is None or not session_id:
            raise InvalidRequestError(
                "the first message of a stream must name its session", subjects=["session_id"]
            )
        self._check_writer(call, session_id)
        with self._worker.stream(session_id) as sink, self._streams.of(session_id, call):
            sink.write(chunk)
            for chunk in chunks:
                if chunk.session_id not in ("", session_id):
                    raise InvalidRequestError(
                        f"a stream belongs to one session: this one to {session_id}, not"
                        f" {chunk.session_id[:64]!r}",
                        subjects=["session_id"],
                    )
                sink.write(chunk)
            return answers.stream_report_to_proto(sink.report())

    def get_weight_update(
        self, request: pb.GetWeightUpdateRequest, _call: grpc.ServicerContext
    ) -> pb.GetWeightUpdateResponse:
        """Tell where a session stands."""
        start = _page_start(request.page_token)
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        session = self._worker.update(request.session_id)
        missing, end = self._worker.missing(request.session_id, start, size)
        return pb.GetWeightUpdateResponse(
            session=answers.session_to_proto(session),
            missing=map(answers.missing_to_proto, missing),
            next_page_token="" if end is None else str(end),
        )

    def prepare_weight_update(
        self, request: pb.PrepareWeightUpdateRequest, call: grpc.ServicerContext
    ) -> pb.PrepareWeightUpdateResponse:
        """Check that everything is there."""
        self._check_writer(call, request.session_id)
        report = self._worker.prepare(request.session_id, time_left(call))
        return answers.prepare_to_proto(report)

    def finish_weight_update(
        self, request: pb.FinishWeightUpdateRequest, call: grpc.ServicerContext
    ) -> pb.FinishWeightUpdateResponse:
        """Commit."""
        self._check_writer(call, request.session_id)
        report = self._worker.finish(request.session_id, time_left(call))
        return answers.commit_to_proto(report)

    def abort_weight_update(
        self, request: pb.AbortWeightUpdateRequest, call: grpc.ServicerContext
    ) -> pb.AbortWeightUpdateResponse:
        """Drop a session."""
        self._check_writer(call, request.session_id)
        session = self._worker.abort(request.session_id, request.cause)
        return pb.AbortWeightUpdateResponse(session=answers.session_to_proto(session))

    def verify_weights(
        self, request: pb.VerifyWeightsRequest, _call: grpc.ServicerContext
    ) -> Iterator[pb.VerifyWeightsResponse]:
        """Digest the live tensors."""
        targets = self._targets(request.targets, "targets")
        if request.names and len(request.targets) != 1:
            raise InvalidRequestError(
                "names belong to one target: give exactly one with them", subjects=["targets"]
            )
        check_count(len(request.names), "names", self._worker.limits)
        digests = self._worker.reader.digests(targets, list(request.names))
        for batch in _batches(map(answers.digest_to_proto, digests)):
            yield pb.VerifyWeightsResponse(digests=batch)

    def read_weights(
        self, request: pb.ReadWeightsRequest, _call: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Send live tensors out, put together by the chunk serializer."""
        (target,) = self._targets([request.target], "target")
        check_count(len(request.names), "names", self._worker.limits)
        yield from self._worker.reader.read(
            target,
            list(request.names),
            lambda segments, buffers, version: serialize_read_chunk(
                segments, buffers, ChecksumType.XXH3_64, version
            ),
        )

    def watch_worker(
        self, request: pb.WatchWorkerRequest, call: grpc.ServicerContext
    ) -> Iterator[pb.WatchWorkerResponse]:
        """Send events until the client goes, or the worker stops."""
        events = self._worker.watch(request.after_sequence)
        try:
            # The callback is refused when the client has gone already.
            if call.add_callback(events.close):
                while (event := events.next()) is not None:
                    yield answers.event_to_proto(event)
        finally:
            events.close()

    def _check_writer(self, call: grpc.ServicerContext, session_id: str) -> None:
        """Refuse a caller who may not write all targets of a session."""
        self._access.caller(call).require_targets(self._worker.update(session_id).targets)

    def _targets(self, values: Iterable[int], field: str) -> list[Target]:
        return self._worker.targets(targets_from_proto(values, field))


def time_left(call: grpc.ServicerContext) -> float | None:
    """Return the seconds until the caller's deadline, None if it set none."""
    seconds = call.time_remaining()
    # Without a deadline gRPC tells the distance to the end of its calendar.
    return None if seconds > threading.TIMEOUT_MAX else seconds


def _page_start(token: str) -> int:
    if not token:
        return 0
    if not (token.isascii() and token.isdecimal() and len(token) <= len(str(1 << 63))):
        raise InvalidRequestError(
            f"page_token {token[:64]!r} is none of this worker's; pass the one of the answer"
            " before, or none",
            subjects=["page_token"],
        )
    return int(token)


def _batches(messages: Iterable[M]) -> Iterator[list[M]]:
    batch: list[M] = []
    size = 0
    for message in messages:
        batch.append(message)
        size += message.ByteSize()
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
