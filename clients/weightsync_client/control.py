"""Control of one worker's engine around updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from weightsync.core.views import TargetStatus
from weightsync.v1 import engine_control_pb2 as pb
from weightsync.v1.engine_control_pb2_grpc import EngineControlStub
from weightsync.v1.types_pb2 import TargetStatus as TargetStatusProto
from weightsync.wire import answers


class Control:
    """Holds an engine, puts it to sleep, wakes it up; made by `Worker.control`.

    What an engine can do is told by `WorkerInfo.controls`; all else is an `UnsupportedError`.
    """

    def __init__(self, stub: EngineControlStub, call: Callable[..., Any]) -> None:
        """Take what makes a call of the stub with a request."""
        self._stub = stub
        self._call = call

    def pause(self) -> None:
        """Hold generation before the next forward pass. Idempotent."""
        self._call(self._stub.PauseGeneration, pb.PauseGenerationRequest())

    def resume(self) -> None:
        """Let generation go on. Idempotent."""
        self._call(self._stub.ResumeGeneration, pb.ResumeGenerationRequest())

    def sleep(self, level: int) -> tuple[TargetStatus, ...]:
        """Free the memory of the weights; return what became of the targets.

        Args:
            level: 1 keeps the weights in host memory, 2 drops them.
        """
        return _statuses(self._call(self._stub.Sleep, pb.SleepRequest(level=level)).targets)

    def wake_up(self, tags: Sequence[str] = ()) -> tuple[TargetStatus, ...]:
        """Bring memory back; return what became of the targets.

        Args:
            tags: What is to come back, in the engine's words, e.g. `weights`; none: all.
        """
        return _statuses(self._call(self._stub.WakeUp, pb.WakeUpRequest(tags=tags)).targets)

    def reset_prefix_cache(self) -> None:
        """Drop results that were computed with earlier weights."""
        self._call(self._stub.ResetPrefixCache, pb.ResetPrefixCacheRequest())


def _statuses(messages: Iterable[TargetStatusProto]) -> tuple[TargetStatus, ...]:
    return tuple(map(answers.target_status_from_proto, messages))
