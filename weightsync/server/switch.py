"""Holding, sleeping and waking an engine, and what that means for its versions."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

from weightsync.core.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    TargetBusyError,
    UnsupportedError,
)
from weightsync.core.types import Target, TargetState
from weightsync.core.views import EventKind
from weightsync.engines.base import WEIGHTS, CanResetPrefixCache, CanSleep, SleepsByItself
from weightsync.server.books import Books

_OWNER = "control"
_DROPPED = "its weights were dropped by a sleep"

KEEP, DROP = 1, 2
"""Levels of sleep."""


class EngineSwitch:
    """The EngineControl service, without gRPC, and the one place where targets sleep and wake.

    An engine that sleeps of its own accord has this as its `SleepWatcher`.
    """

    def __init__(self, books: Books) -> None:
        """Control the engine of these books."""
        self._books = books
        self._engine = books.engine
        # Held from before memory goes or comes until the books say so.
        self._turning = threading.Lock()
        self._dropped = False
        if hasattr(self._engine, "watch_sleep"):
            cast("SleepsByItself", self._engine).watch_sleep(self)

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
        self._engine.gate.pause(_OWNER, self._books.limits.gate_timeout)

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
        with self._books.lock:
            for session in self._books.table.open_sessions():
                raise TargetBusyError(
                    f"session {session.session_id} is open; end it before the engine sleeps",
                    session_id=session.session_id,
                    holder=session.request.holder,
                    retry_after=1.0,
                )
        with self.falling_asleep(drops=level == DROP):
            engine.sleep(level)

    def wake_up(self, tags: Collection[str] = ()) -> None:
        """Bring memory back: what the tags name, or all.

        Targets sleep until their weights are back. One whose weights were dropped is quarantined
        then, until a FULL session has written it.

        Raises:
            UnsupportedError: the engine can't, or has no such tag.
        """
        engine = self._sleeper()
        with self.waking() if not tags or WEIGHTS in tags else nullcontext():
            engine.wake_up(tags)

    @contextmanager
    def falling_asleep(self, *, drops: bool) -> Iterator[None]:
        """Free the memory of the weights within the block; sessions are aborted before it.

        Args:
            drops: Whether the weights are lost, too.
        """
        with self._turning:
            before = self._put_to_sleep()
            try:
                yield
            except BaseException:
                with self._books.lock:
                    for target, state in before.items():
                        self._books.models.records[target].state = state
                raise
            finally:
                self._books.tell_serving()
            if drops:
                with self._books.lock:
                    self._dropped = True
                    self._books.models.forget_weights()

    def _put_to_sleep(self) -> dict[Target, TargetState]:
        """Let nobody use the weights from now on; return the states until now."""
        books = self._books
        while True:
            books.abort_all("the engine went to sleep")
            with books.lock:
                if books.updates:
                    continue  # it was opened meanwhile
                records = books.models.records
                before = {target: record.state for target, record in records.items()}
                for record in records.values():
                    record.state = TargetState.ASLEEP
                break
        books.reader.wait_until_unused()
        return before

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Bring the memory of the weights back within the block."""
        with self._turning:
            books = self._books
            with books.lock:
                records = books.models.records.items()
                asleep = {t: record for t, record in records if record.state is TargetState.ASLEEP}
            if self._dropped:
                # Before the first forward pass can start.
                for target, record in asleep.items():
                    record.quarantine_reason = _DROPPED
                    self._engine.gate.quarantine(target, _DROPPED)
                    books.trace.told("quarantine", target=target, reason=_DROPPED)
            yield
            with books.lock:
                for record in asleep.values():
                    held = record.quarantine_reason
                    record.state = TargetState.QUARANTINED if held else TargetState.READY
                if self._dropped:
                    books.events.publish(
                        EventKind.QUARANTINED, asleep, cause=_DROPPED, time=time.time()
                    )
                self._dropped = False
            books.tell_serving()

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
            calls = getattr(self._engine, "sleep_calls", "")
            instead = f" by the service; use {calls}" if calls else ""
            raise UnsupportedError(f"this engine can't be put to sleep or woken up{instead}")
        return cast("CanSleep", self._engine)
