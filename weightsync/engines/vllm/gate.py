"""The gap between two steps of a vLLM worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from weightsync.core.errors import UnsupportedError
from weightsync.core.types import Target
from weightsync.engines.gate import StepGate

# Whole calls in which models run, beside the two halves of a step.
_WHOLE = ("determine_available_memory", "compile_or_warm_up_model", "execute_dummy_batch")


class WorkerGate(StepGate):
    """A `Gate` around the steps of one worker: from `execute_model` to the end of `sample_tokens`.

    A worker that is one of several ranks can't choose its own moment: the ranks would run one step
    with weights of two versions. There, only `driven` blocks may have exclusive access: they run in
    calls that vLLM makes on all ranks between the same two steps.
    """

    def __init__(self, worker: Any, *, num_ranks: int) -> None:  # noqa: ANN401 - of any device
        """Put a worker under the gate, which must be loaded and must not have made a step."""
        super().__init__()
        self._worker = worker
        self._num_ranks = num_ranks
        self._driver: int | None = None
        self._step = ExitStack()
        for name in _WHOLE:
            self._wrap(name, self._whole)
        self._wrap("execute_model", self._first_half)
        self._wrap("sample_tokens", self._second_half)

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Run a call of vLLM's, which it makes on all ranks between two steps."""
        self._driver = threading.get_ident()
        try:
            yield
        finally:
            self._driver = None

    @contextmanager
    def exclusive(self, timeout: float) -> Iterator[None]:
        """Wait until no step runs, and hold the next one until the block ends.

        Raises:
            EngineUnavailableError: no step boundary within `timeout` seconds.
            UnsupportedError: there are other ranks, and the call is not vLLM's.
        """
        if self._num_ranks > 1 and self._driver != threading.get_ident():
            raise UnsupportedError(
                f"this worker is one of {self._num_ranks} ranks, which must change their weights "
                "at the same step: prepare the session on all of them, then let vLLM commit it "
                "(update_weights of its weight transfer API); see docs/vllm.md"
            )
        with super().exclusive(timeout):
            self._synchronize()
            yield
            self._synchronize()

    def pause(self, owner: str, timeout: float) -> None:
        """Hold the next step until `resume` of the same owner; not for one of several ranks.

        Raises:
            EngineUnavailableError: no step boundary within `timeout` seconds; nothing is held.
            UnsupportedError: there are other ranks.
        """
        if self._num_ranks > 1:
            raise UnsupportedError(
                f"this worker is one of {self._num_ranks} ranks and can't stop alone; pause with "
                "vLLM's own pause_generation"
            )
        super().pause(owner, timeout)

    def quarantine(self, target: Target, reason: str | None) -> None:
        """Hold steps while a target must not serve: an error in a step would end vLLM.

        One of several ranks lets the next step fail instead: it could not be healed while the
        others wait for it in that step.
        """
        if self._num_ranks > 1:
            super().quarantine(target, reason)
            return
        with self._changed:
            held = self._owners.discard if reason is None else self._owners.add
            held(f"quarantine of the {target}")
            self._changed.notify_all()

    def _wrap(self, name: str, around: Callable[..., object]) -> None:
        inner = getattr(self._worker, name)
        setattr(self._worker, name, lambda *args, **kwargs: around(inner, *args, **kwargs))

    def _whole(self, inner: Callable[..., object], *args: object, **kwargs: object) -> object:
        with self.step(Target.VERIFIER):
            return inner(*args, **kwargs)

    def _first_half(self, inner: Callable[..., object], *args: object, **kwargs: object) -> object:
        self._step.close()
        with ExitStack() as step:
            step.enter_context(self.step(Target.VERIFIER))
            output = inner(*args, **kwargs)
            if output is None:
                # Sampling follows, and the draft's proposals.
                self._step = step.pop_all()
            return output

    def _second_half(self, inner: Callable[..., object], *args: object, **kwargs: object) -> object:
        with self._step:
            return inner(*args, **kwargs)

    def _synchronize(self) -> None:
        device = self._worker.device
        if device.type != "cpu":
            # Each thread has a current device of its own.
            torch.accelerator.set_device_index(device)
            torch.accelerator.synchronize(device)
