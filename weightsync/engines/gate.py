"""The gap between two forward passes: forwards are the readers of a lock, commits its writers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from weightsync.core.errors import EngineUnavailableError, QuarantinedError
from weightsync.core.types import Target


class StepGate:
    """A `Gate` for engines whose forward passes are calls of `nn.Module`, from any thread.

    One gate serves both models. Forwards of several threads run side by side; a waiting writer
    holds new ones, so that steady traffic can't keep it out. Nested forwards and forwards of the
    thread that has exclusive access pass at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # What runs in each thread, outermost first; keys are thread idents.
        self._running: dict[int, list[object]] = {}
        self._writer: int | None = None
        self._waiting_writers = 0
        self._owners: set[str] = set()
        self._quarantined: dict[Target, str] = {}
        self._hooks: list[RemovableHandle] = []

    def attach(self, module: nn.Module, target: Target) -> None:
        """Gate each call of a module: of the outermost object that is called for this target."""

        # Plain functions: a deep copy of the module takes its hooks along, and can't copy a lock.
        def before(module: nn.Module, _args: object) -> None:
            self._enter(module, target)

        def after(module: nn.Module, _args: object, _output: object) -> None:
            self._leave(module)

        # Not to be traced: a compiled model must ask the gate at each call.
        enter = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        leave = torch.compiler.disable(after)  # type: ignore[no-untyped-call]
        self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def detach(self) -> None:
        """Take the gate off all modules."""
        while self._hooks:
            self._hooks.pop().remove()

    @contextmanager
    def step(self, target: Target) -> Iterator[None]:
        """Mark a block as one forward pass, for engines with a loop of their own.

        Raises:
            QuarantinedError: the target must not serve.
        """
        token = object()
        try:
            self._enter(token, target)
            yield
        finally:
            self._leave(token)

    @contextmanager
    def exclusive(self, timeout: float) -> Iterator[None]:
        """Wait until no forward pass runs, and hold the next one until the block ends.

        Reentrant in one thread; works while paused.

        Raises:
            EngineUnavailableError: no step boundary within `timeout` seconds.
        """
        me = threading.get_ident()
        if self._writer == me:
            yield
            return
        with self._changed:
            self._waiting_writers += 1
            try:
                self._wait_idle(timeout)
                self._writer = me
            finally:
                self._waiting_writers -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._writer = None
                self._changed.notify_all()

    def pause(self, owner: str, timeout: float) -> None:
        """Hold generation before the next forward pass until `resume` of the same owner.

        Idempotent per owner; several owners may hold it. Returns when no forward pass runs.

        Raises:
            EngineUnavailableError: no step boundary within `timeout` seconds; nothing is held.
        """
        with self._changed:
            held_before = owner in self._owners
            self._owners.add(owner)
            try:
                self._wait_idle(timeout)
            except EngineUnavailableError:
                if not held_before:
                    self.resume(owner)
                raise

    def resume(self, owner: str) -> None:
        """Let generation go on, unless another owner still holds it. Idempotent."""
        with self._changed:
            self._owners.discard(owner)
            self._changed.notify_all()

    def quarantine(self, target: Target, reason: str | None) -> None:
        """Refuse forward passes of a target with an error (`reason`), or serve again (None)."""
        with self._changed:
            if reason is None:
                self._quarantined.pop(target, None)
            else:
                self._quarantined[target] = reason

    def _wait_idle(self, timeout: float) -> None:
        mine = (None, threading.get_ident())
        if not self._changed.wait_for(lambda: self._writer in mine and not self._running, timeout):
            what = "another commit" if self._writer not in mine else "a forward pass"
            raise EngineUnavailableError(
                f"no step boundary within {timeout:g} s: {what} is still running; try again, or "
                "allow more time (gate_timeout)",
                retry_after=timeout,
            )

    def _enter(self, token: object, target: Target) -> None:
        me = threading.get_ident()
        with self._changed:
            nested = self._running.get(me, [])
            if token in nested:
                # No model calls itself: an interrupt tore that forward off, past torch's hooks.
                self._leave(token)
                nested = self._running.get(me, [])
            if not nested and self._writer != me:
                self._changed.wait_for(self._open)
            # Noted before the refusal: torch calls the hook behind a forward then, too.
            self._running.setdefault(me, []).append(token)
            reason = self._quarantined.get(target)
        if reason is not None:
            raise QuarantinedError(
                f"the {target} must not serve until a full update has succeeded: {reason}",
                subjects=[str(target)],
            )

    def _open(self) -> bool:
        return self._writer is None and not self._waiting_writers and not self._owners

    def _leave(self, token: object) -> None:
        me = threading.get_ident()
        with self._changed:
            nested = self._running.get(me, [])
            if token not in nested:
                return
            del nested[nested.index(token) :]
            if not nested:
                del self._running[me]
                self._changed.notify_all()
