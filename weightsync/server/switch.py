"""Holding, sleeping and waking an engine, and what that means for its versions."""

from __future__ import annotations

import threading
from typing import cast

from weightsync.core.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    TargetBusyError,
    UnsupportedError,
)
from weightsync.core.session import SessionTable
from weightsync.core.trace import Trace
from weightsync.core.types import Limits, TargetState
from weightsync.engines.base import CanResetPrefixCache, CanSleep, Engine
from weightsync.server.models import Models

_OWNER = "control"

KEEP, DROP = 1, 2
"""Levels of sleep."""


class EngineSwitch:
    """The EngineControl service, without gRPC."""

    def __init__(
        self,
        engine: Engine,
        *,
        models: Models,
        table: SessionTable,
        lock: threading.Condition,
        limits: Limits,
        trace: Trace,
    ) -> None:
        """Control an engine; `lock` guards the books."""
        self._engine = engine
        self._models = models
        self._table = table
        self._lock = lock
        self._limits = limits
        self._trace = trace
        self._dropped = False

    @property
    def controls(self) -> tuple[str, ...]:
        """What the engine can do, by the name of the rpc."""
        names = ["PauseGeneration", "ResumeGeneration"]
        if hasattr(self._engine, "sleep"):
            names += ["Sleep", "WakeUp"]
        if hasattr(self._engine, "reset_prefix_cache"):
            names += ["ResetPrefixCache"]
        return tuple(names)

    def pause(self) -> None:
        """Hold generation before the next forward pass. Idempotent.

        Raises:
            EngineUnavailableError: no step boundary in time.
        """
        self._engine.gate.pause(_OWNER, self._limits.gate_timeout)

    def resume(self) -> None:
        """Let generation go on, unless a session holds it. Idempotent."""
        self._engine.gate.resume(_OWNER)

    def sleep(self, level: int) -> None:
        """Free the memory of the weights.

        Raises:
            InvalidRequestError: an unknown level.
            UnsupportedError: the engine can't.
            TargetBusyError: a session is open.
        """
        engine = self._sleeper()
        if level not in (KEEP, DROP):
            raise InvalidRequestError(
                f"sleep level {level} is unknown; there are {KEEP} and {DROP}", subjects=["level"]
            )
        with self._lock:
            for session in self._table.open_sessions():
                raise TargetBusyError(
                    f"session {session.session_id} is open; end it before the engine sleeps",
                    session_id=session.session_id,
                    holder=session.request.holder,
                    retry_after=1.0,
                )
            before = {target: record.state for target, record in self._models.records.items()}
            for record in self._models.records.values():
                record.state = TargetState.ASLEEP
        try:
            engine.sleep(level)
        except BaseException:
            with self._lock:
                for target, state in before.items():
                    self._models.records[target].state = state
            raise
        with self._lock:
            if level == DROP:
                self._dropped = True
                self._models.forget_weights()

    def wake_up(self) -> None:
        """Bring the memory back.

        A target whose weights were dropped is quarantined until a FULL session has written it.

        Raises:
            UnsupportedError: the engine can't.
        """
        engine = self._sleeper()
        with self._lock:
            asleep = [
                (target, record)
                for target, record in self._models.records.items()
                if record.state is TargetState.ASLEEP
            ]
        if not asleep:
            return
        if self._dropped:
            # Before the first forward pass can start.
            for target, record in asleep:
                record.quarantine_reason = "its weights were dropped by a sleep"
                self._engine.gate.quarantine(target, record.quarantine_reason)
                self._trace.told("quarantine", target=target, reason=record.quarantine_reason)
        engine.wake_up()
        with self._lock:
            for _, record in asleep:
                held = record.quarantine_reason
                record.state = TargetState.QUARANTINED if held else TargetState.READY
            self._dropped = False

    def reset_prefix_cache(self) -> None:
        """Drop results that were computed with earlier weights.

        Raises:
            UnsupportedError: the engine has no such cache.
            EngineUnavailableError: it could not be reset now.
        """
        if not hasattr(self._engine, "reset_prefix_cache"):
            raise UnsupportedError("this engine has no prefix cache")
        if not cast("CanResetPrefixCache", self._engine).reset_prefix_cache():
            raise EngineUnavailableError(
                "the prefix cache could not be reset now; try again", retry_after=1.0
            )

    def _sleeper(self) -> CanSleep:
        if not hasattr(self._engine, "sleep"):
            raise UnsupportedError("this engine can't sleep")
        return cast("CanSleep", self._engine)
