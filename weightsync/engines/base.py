"""The small protocol between the service and an inference engine.

An adapter says which models it has, how their parameters are named and laid out, and where the
gap between two forward passes is. All else (sessions, staging, commit, rollback, checks) is done
by weightsync. Every adapter must pass the suite in `weightsync.testing.conformance`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from weightsync.core.types import CacheReset, Coordinates, Target
from weightsync.layout.plan import Layout

Written = Mapping[Target, Collection[str]]
"""Names of written parameters, by target."""


class TargetModel(Protocol):
    """One live model of an engine."""

    @property
    def layout(self) -> Layout:
        """Where checkpoint tensors lie in the engine's parameters, with storage identities.

        The same object until a tensor has been replaced: by `unshare`, or by a sleep.
        """

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors by engine name; all that `layout.parameters` names.

        Called anew for each use: an engine may have replaced a tensor.
        """

    def unshare(self, names: Collection[str]) -> None:
        """Give parameters a storage of their own, with equal values, cutting them off the verifier.

        Called under the gate. Ties within this model stay: what lies on one storage with a named
        parameter moves along.

        Raises:
            UnsupportedError: the models can't be told apart; nothing was changed.
        """


class Gate(Protocol):
    """The gap between two forward passes, for all models of the engine together."""

    def exclusive(self, timeout: float) -> AbstractContextManager[None]:
        """Wait until no forward pass runs, and hold the next one until the block ends.

        Reentrant with `pause`: a paused engine enters at once.

        Raises:
            EngineUnavailableError: no step boundary within `timeout` seconds.
        """

    def pause(self, owner: str, timeout: float) -> None:
        """Hold generation before the next forward pass until `resume` of the same owner.

        Idempotent per owner; several owners may hold it. Returns when no forward pass runs.

        Raises:
            EngineUnavailableError: no step boundary within `timeout` seconds; nothing is held.
        """

    def resume(self, owner: str) -> None:
        """Let generation go on, unless another owner still holds it. Idempotent."""

    def quarantine(self, target: Target, reason: str | None) -> None:
        """Refuse forward passes of a target with an error (`reason`), or serve again (None)."""


class Engine(Protocol):
    """An inference engine with one or two models."""

    @property
    def name(self) -> str:
        """Short name of the adapter, e.g. `torch`."""

    @property
    def version(self) -> str:
        """Version of the engine."""

    @property
    def coordinates(self) -> Coordinates:
        """Place of this worker among its peers."""

    @property
    def targets(self) -> Mapping[Target, TargetModel]:
        """The models; a target without weights is left out."""

    @property
    def gate(self) -> Gate:
        """The gap between two forward passes."""

    def committed(self, written: Written) -> CacheReset:
        """Drop what was computed from old weights.

        Args:
            written: The session's targets, and any that share what it wrote, each with its names
                of the parameters whose storage was written; derive anew what these feed.

        Called under the gate after the last write of a commit, once per session: derived buffers
        are rebuilt here, the prefix cache is reset here. An exception rolls the commit back, and
        is followed by another call once the old weights are in place again.
        """


WEIGHTS = "weights"
"""The tag of weights among what can be woken up."""


class CanSleep(Protocol):
    """An engine that can free the memory of its weights."""

    def sleep(self, level: int) -> None:
        """Free it. Level 1 keeps a copy in host memory, level 2 keeps buffers only.

        Raises:
            UnsupportedError: an unknown level.
        """

    def wake_up(self, tags: Collection[str] = ()) -> None:
        """Bring memory back; contents of weights after level 2 are undefined. Idempotent.

        Args:
            tags: What is to come back, `WEIGHTS` or a word of the engine's; none: all.

        Raises:
            UnsupportedError: an unknown tag; nothing came back.
        """


class SleepWatcher(Protocol):
    """Who must know, before it happens, that an engine falls asleep or wakes up."""

    def falling_asleep(self, *, drops: bool) -> AbstractContextManager[None]:
        """Free the memory of the weights within the block; before it, sessions have ended.

        Args:
            drops: Whether the weights are lost, too.
        """

    def waking(self) -> AbstractContextManager[None]:
        """Bring the memory of the weights back within the block."""


class SleepsByItself(Protocol):
    """An engine that is put to sleep by calls of its own, instead of through `CanSleep`.

    Attributes:
        sleep_calls: These calls, for those who tried to do it through the service.
    """

    sleep_calls: str

    def watch_sleep(self, watcher: SleepWatcher) -> None:
        """Tell a watcher from now on, in whichever thread the engine falls asleep or wakes up."""


class CanResetPrefixCache(Protocol):
    """An engine with a cache of results of earlier requests."""

    def reset_prefix_cache(self) -> bool:
        """Drop it; False if it can't be done now."""
