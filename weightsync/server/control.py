"""The EngineControl service."""

from __future__ import annotations

import grpc

from weightsync.server.worker import Worker
from weightsync.v1 import engine_control_pb2 as pb
from weightsync.v1.types_pb2 import TargetStatus
from weightsync.wire import answers
from weightsync.wire.requests import check_count


class EngineControlService:
    """One method per rpc; what each does and raises is told in the contract."""

    def __init__(self, worker: Worker) -> None:
        """Control a worker's engine."""
        self._worker = worker

    def pause_generation(
        self, _request: pb.PauseGenerationRequest, _call: grpc.ServicerContext
    ) -> pb.PauseGenerationResponse:
        """Hold generation."""
        self._worker.switch.pause()
        return pb.PauseGenerationResponse()

    def resume_generation(
        self, _request: pb.ResumeGenerationRequest, _call: grpc.ServicerContext
    ) -> pb.ResumeGenerationResponse:
        """Let generation go on."""
        self._worker.switch.resume()
        return pb.ResumeGenerationResponse()

    def sleep(self, request: pb.SleepRequest, _call: grpc.ServicerContext) -> pb.SleepResponse:
        """Free the memory of the weights."""
        self._worker.switch.sleep(request.level)
        return pb.SleepResponse(targets=self._targets())

    def wake_up(self, request: pb.WakeUpRequest, _call: grpc.ServicerContext) -> pb.WakeUpResponse:
        """Bring the memory back."""
        check_count(len(request.tags), "tags", self._worker.limits)
        self._worker.switch.wake_up(tuple(request.tags))
        return pb.WakeUpResponse(targets=self._targets())

    def reset_prefix_cache(
        self, _request: pb.ResetPrefixCacheRequest, _call: grpc.ServicerContext
    ) -> pb.ResetPrefixCacheResponse:
        """Drop results that were computed with earlier weights."""
        self._worker.switch.reset_prefix_cache()
        return pb.ResetPrefixCacheResponse()

    def _targets(self) -> list[TargetStatus]:
        return [answers.target_status_to_proto(s) for s in self._worker.info().targets]
