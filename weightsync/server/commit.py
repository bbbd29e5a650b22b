"""The two phases of a commit: check everything beforehand, then change everything at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.apply.checks import Live, all_finite, broken_groups, equals_live
from weightsync.apply.exchange import Exchange
from weightsync.arena.block import Block
from weightsync.arena.staging import Staging
from weightsync.core.errors import (
    CommitFailedError,
    CommitRolledBackError,
    IncompleteError,
    NotFiniteError,
    NothingAppliedError,
    SharedWeightError,
)
from weightsync.core.trace import Trace
from weightsync.core.types import CacheReset, SharedTensorPolicy, Target, UpdateMode, UpdateRequest
from weightsync.core.views import MissingTensor
from weightsync.engines.base import Engine, Written
from weightsync.layout.shares import ParameterKey
from weightsync.server.models import Plan

NAMED = 10
"""How many missing tensors an error names."""

Group = tuple[ParameterKey, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit did.

    Attributes:
        applied_bytes: Bytes written into live weights.
        pause_seconds: How long forward passes were held.
        checked_share_groups: Share groups found to be one storage afterwards.
        cache_reset: What became of the engine's cache.
    """

    applied_bytes: int
    pause_seconds: float
    checked_share_groups: int
    cache_reset: CacheReset


class Commit:
    """The commit of one session."""

    def __init__(
        self,
        engine: Engine,
        *,
        plan: Plan,
        request: UpdateRequest,
        staging: Staging,
        live: Callable[[], Live],
        trace: Trace,
    ) -> None:
        """Commit what `staging` holds to the engine's models."""
        self._engine = engine
        self._plan = plan
        self._request = request
        self._staging = staging
        self._live = live
        self._trace = trace

    # -- before --------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what must not be committed; nothing live changes.

        Raises:
            IncompleteError, NothingAppliedError, NotFiniteError, SharedWeightError: as they say.
        """
        missing = list(self._staging.missing())
        if missing:
            raise _incomplete(missing)
        if not self._staging.applied:
            raise NothingAppliedError(
                "no tensor was written in this session; compare the names that were sent with"
                " ListTensors, or abort the session"
            )
        blocks = self._staging.blocks
        if self._request.check_finite:
            for block in blocks:
                for box, memory in block.written():
                    if not all_finite(memory, block.dtype):
                        raise NotFiniteError(
                            f"{block.key} would hold NaN or infinity at {box}; the session asked"
                            " to refuse that",
                            subjects=[str(block.key)],
                        )
        if self._request.shared_tensors is SharedTensorPolicy.ACCEPT_EQUAL:
            self._check_equal(blocks)

    def _check_equal(self, blocks: list[Block]) -> None:
        live = self._live()
        for block in blocks:
            tensor = live[block.key.target][block.key.name]
            if block.foreign and not all(
                equals_live(tensor, box, memory) for box, memory in block.written()
            ):
                raise SharedWeightError(
                    f"{block.key} is one storage with the verifier's and was sent with other"
                    " bytes; leave it out, write it in a session with both targets, or unshare",
                    subjects=[str(block.key)],
                )

    # -- the change ----------------------------------------------------------------------------

    def run(self, timeout: float) -> Outcome:
        """Make the session live between two forward passes.

        Raises:
            EngineUnavailableError: no step boundary in `timeout` seconds; nothing changed.
            SharedWeightError: the verifier changed under a tensor that was accepted as equal;
                nothing changed.
            CommitRolledBackError: the old version is back, bit for bit.
            CommitFailedError: the content is unknown.
        """
        with self._engine.gate.exclusive(timeout):
            start = time.perf_counter()
            blocks = self._staging.blocks
            if self._request.shared_tensors is SharedTensorPolicy.ACCEPT_EQUAL:
                self._check_equal(blocks)
            exchange = Exchange()
            try:
                groups = self._unshare(blocks)
                applied = self._exchange(exchange, blocks)
                cache_reset = self._engine.committed(self._written(blocks))
                self._check_shares(groups)
            except BaseException as error:
                self._take_back(exchange, blocks, error)
                raise
            return Outcome(applied, time.perf_counter() - start, len(groups), cache_reset)

    def _exchange(self, exchange: Exchange, blocks: list[Block]) -> int:
        applied = 0
        live = self._live()
        for block in self._to_write(blocks):
            self._trace("commit.parameter", parameter=str(block.key))
            for box, memory in block.written():
                applied += memory.nbytes
                if self._request.mode is UpdateMode.STAGED:
                    exchange.swap(live[block.key.target][block.key.name], box, memory)
        return applied

    def _written(self, blocks: list[Block]) -> Written:
        """Return the parameters on the storages of blocks, under all their names."""
        written: dict[Target, set[str]] = {target: set() for target in self._request.targets}
        for block in self._to_write(blocks):
            for member in self._plan.shares.members(block.key):
                # What was unshared is the draft's alone by now.
                if not block.foreign or member.target is Target.DRAFT:
                    written.setdefault(member.target, set()).add(member.name)
        return written

    def _to_write(self, blocks: list[Block]) -> list[Block]:
        """Return the blocks without those that are only compared."""
        compared = self._request.shared_tensors is SharedTensorPolicy.ACCEPT_EQUAL
        return [block for block in blocks if not (block.foreign and compared)]

    def _unshare(self, blocks: list[Block]) -> list[Group]:
        """Cut what the session wants cut; return the groups that must hold afterwards."""
        groups = self._plan.shares.groups()
        if self._request.shared_tensors is not SharedTensorPolicy.UNSHARE:
            return groups
        cut = {
            member
            for block in blocks
            if block.foreign
            for member in self._plan.shares.members(block.key)
            if member.target is Target.DRAFT
        }
        if not cut:
            return groups
        self._engine.targets[Target.DRAFT].unshare({key.name for key in cut})
        parts = (
            part
            for group in groups
            for part in (
                tuple(k for k in group if k not in cut),
                tuple(k for k in group if k in cut),
            )
        )
        return [part for part in parts if len(part) > 1]

    def _check_shares(self, groups: list[Group]) -> None:
        broken = broken_groups(self._live(), groups)
        self._trace("share.checked", groups=len(groups), broken=len(broken))
        if broken:
            names = "; ".join(" = ".join(map(str, group)) for group in broken[:NAMED])
            raise CommitFailedError(
                f"the engine cut shared storage during the commit: {names}",
                subjects=[str(key) for group in broken[:NAMED] for key in group],
            )

    def _take_back(self, exchange: Exchange, blocks: list[Block], error: BaseException) -> None:
        if self._request.mode is UpdateMode.IN_PLACE:
            raise CommitFailedError(
                f"the commit failed after live weights were written in place: {error}"
            ) from error
        try:
            with self._trace.span("rollback"):
                exchange.take_back()
                self._engine.committed(self._written(blocks))
                self._check_shares(_still_shared(self._plan.shares.groups(), self._request))
        except BaseException as second:
            raise CommitFailedError(
                f"the commit failed ({error}) and so did taking it back ({second})"
            ) from second
        raise CommitRolledBackError(
            f"the commit failed and the old version was restored: {error}"
        ) from error


def _still_shared(groups: list[Group], request: UpdateRequest) -> list[Group]:
    """Return the groups that a taken-back commit must leave intact.

    What was unshared stays so, with equal values: its bytes are the old version all the same.
    """
    if request.shared_tensors is SharedTensorPolicy.UNSHARE:
        groups = [tuple(k for k in g if k.target is Target.VERIFIER) for g in groups]
    return [group for group in groups if len(group) > 1]


def _incomplete(missing: list[MissingTensor]) -> IncompleteError:
    nbytes = sum(m.missing_bytes for m in missing)
    first = [f"{m.target}:{m.name} {', '.join(map(str, m.regions[:3]))}" for m in missing[:NAMED]]
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return IncompleteError(
        f"{len(missing)} tensors ({nbytes} bytes) are missing: {'; '.join(first)}{more}. Send"
        " them, or abort the session",
        subjects=[f"{m.target}:{m.name}" for m in missing[:NAMED]],
        missing=str(len(missing)),
        missing_bytes=str(nbytes),
    )
