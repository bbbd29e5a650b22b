"""The write path of a session: chunks in, blocks filled, coverage kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from weightsync.arena.arena import ArenaBudget, Bytes
from weightsync.arena.block import Block
from weightsync.arena.claim import Claim, check_session
from weightsync.arena.homes import Homes
from weightsync.arena.placing import ArenaPlan, check_placed, placements
from weightsync.arena.scatter import Cast, Copy, claims, scatter
from weightsync.core.coverage import Coverage
from weightsync.core.dtypes import DType, check_cast
from weightsync.core.errors import (
    InvalidRequestError,
    SessionStateError,
    ShapeMismatchError,
    SharedWeightError,
)
from weightsync.core.names import IgnorePatterns, unknown_tensor
from weightsync.core.regions import Region
from weightsync.core.types import (
    CastPolicy,
    Scope,
    Segment,
    SharedTensorPolicy,
    Target,
    TensorKey,
    UpdateRequest,
)
from weightsync.core.views import MissingTensor, TensorPlacement
from weightsync.layout.plan import Layout, ParameterSpec, Placement, TensorPlan
from weightsync.layout.shares import ParameterKey, Shares

MAX_IGNORED = 1000
"""How many distinct ignored names a session keeps, to list them."""

Memory = Callable[[ParameterKey, ParameterSpec], Bytes]
"""Gives the memory of a block: uint8 of shape (*parameter shape, itemsize)."""


class Staging:
    """What has arrived of one session, and where it lies.

    Several threads may write at once. A message is taken whole or not at all: its copies are
    claimed together, made without holding a lock, and counted together.
    """

    def __init__(
        self,
        request: UpdateRequest,
        *,
        layouts: Mapping[Target, Layout],
        shares: Shares,
        memory: Memory,
        budget: ArenaBudget,
        cast: Cast,
        arena: ArenaPlan | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to take a session's chunks.

        Args:
            request: The session's request.
            layouts: Of all targets of the worker.
            shares: Of the same layouts.
            memory: Where blocks lie; called once per storage, when its first byte comes.
            budget: What the bytes are counted against.
            cast: Converts elements, for sessions that allow it.
            arena: Where blocks lie in an arena that a client maps; None: no client does.
            release: Called once, when the memory is needed no more.

        Raises:
            ArenaFullError: the session may bring more than the budget has left. That is known now,
                for a PARTIAL one, too, and not when half of its bytes have been sent.
        """
        self._request = request
        self._homes = Homes(request.targets, layouts, shares)
        self._memory = memory
        self._budget = budget
        self._cast = cast
        self._arena = arena
        self._release = release
        self._ignore = IgnorePatterns(request.ignore_names)
        self._changed = threading.Condition()
        self._blocks: dict[ParameterKey, Block] = {}
        own = self._homes.boxes(foreign=False)
        self._needed = own if request.scope is Scope.FULL else {}
        self._declared: dict[TensorKey, dict[Region, None]] = {}
        self._ignored: dict[str, None] = {}
        self._claims: list[Claim] = []
        self._num_boxes = 0
        self._sealed = False
        self._closed = False
        self._freed = False
        self._full_bytes = self._homes.nbytes(self._needed)
        self._covered_bytes = 0
        self._reserved = self._most_bytes(own)
        budget.reserve(self._reserved)

    # -- what it holds -------------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        """The storages of which bytes have arrived, in the order of their first byte."""
        with self._changed:
            return [b for b in self._blocks.values() if b.coverage]

    @property
    def applied(self) -> frozenset[TensorKey]:
        """The tensors of which a segment was taken."""
        with self._changed:
            return frozenset(self._declared)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names that an ignore pattern let pass, sorted, at most `MAX_IGNORED`."""
        with self._changed:
            return tuple(sorted(self._ignored))

    @property
    def missing_bytes(self) -> int:
        """Bytes that a FULL session still needs; 0 for PARTIAL."""
        return self._full_bytes - self._covered_bytes

    def missing(self) -> Iterator[MissingTensor]:
        """Yield what has not arrived, each storage by its first name.

        For a PARTIAL session: what is missing of the regions that segments have named.
        """
        if self._request.scope is Scope.FULL:
            if self.missing_bytes:
                yield from self._missing_of_full()
            return
        with self._changed:
            declared = {key: tuple(regions) for key, regions in self._declared.items()}
        for key, regions in declared.items():
            plan = self._homes.layouts[key.target].tensors[key.name]
            yield from self._missing_of(key.target, plan, regions)

    def _missing_of_full(self) -> Iterator[MissingTensor]:
        seen: set[str] = set()
        for target, layout in self._homes.layouts.items():
            for plan in layout.tensors.values():
                key = TensorKey(target, plan.name)
                group = self._homes.shares.group(key)
                if plan.composite or group in seen or self._homes.is_foreign(key):
                    continue
                if group:
                    seen.add(group)
                yield from self._missing_of(target, plan, (Region.whole(plan.shape),))

    def _missing_of(
        self, target: Target, plan: TensorPlan, regions: Sequence[Region]
    ) -> Iterator[MissingTensor]:
        found: list[Region] = []
        for placement in plan.placements:
            home = self._homes.of(ParameterKey(target, placement.parameter))
            for region in regions:
                wanted = region.intersect(placement.source)
                if wanted is None:
                    continue
                with self._changed:
                    block = self._blocks.get(home)
                    holes = (
                        [wanted]
                        if block is None
                        else [
                            placement.to_source(hole)
                            for hole in block.missing(placement.to_dest(wanted))
                        ]
                    )
                found += holes
        if found:
            # Parts of a tensor, or regions that were named, may overlap.
            apart = len(plan.placements) == len(regions) == 1
            boxes = tuple(found) if apart else Coverage(found).boxes
            size = sum(box.numel for box in boxes) * plan.dtype.itemsize
            yield MissingTensor(target, plan.name, boxes, size)

    def placements(self) -> Iterator[TensorPlacement]:
        """Yield where tensors lie in the arena, those that may be placed; none without one."""
        if self._arena is not None:
            yield from placements(self._homes, self._arena, self._request.shared_tensors)

    # -- writing -------------------------------------------------------------------------------

    def write(self, segments: Sequence[Segment], payload: memoryview) -> None:
        """Take one message.

        Args:
            segments: The table; lengths add up to the payload's (checked on parsing).
            payload: The bytes; not kept.

        Raises:
            InvalidRequestError, ShapeMismatchError, DTypeMismatchError, UnknownTensorError,
            SharedWeightError, OverlapConflictError, SessionStateError: nothing
                of the message was taken.
        """
        copies: list[Copy] = []
        declared: list[tuple[TensorKey, Region]] = []
        ignored: list[str] = []
        start = 0
        for segment in segments:
            length = 0 if segment.placed else segment.byte_length
            data = payload[start : start + length]
            start += length
            plan = self._plan(segment)
            if plan is None:
                ignored.append(segment.name)
                continue
            self._check(segment, plan, data)
            declared.append((segment.key, segment.region))
            target = segment.target

            def block_of(placement: Placement, target: Target = target) -> Block:
                return self._block(self._homes.of(ParameterKey(target, placement.parameter)))

            if segment.placed:
                copies.extend(claims(segment, plan, block_of))
            else:
                copies.extend(scatter(segment, plan, data, block_of, self._cast))
        claim = Claim(copies)
        self._claim(claim)
        try:
            for copy in copies:
                copy.run()
        except BaseException:
            self._settle(claim)
            raise
        self._settle(claim, declared, ignored)

    def _plan(self, segment: Segment) -> TensorPlan | None:
        layout = self._homes.layouts.get(segment.target)
        if layout is None:
            raise InvalidRequestError(
                f"tensor {segment.name!r} is for the {segment.target}, which this session does"
                " not write; start a session with both targets",
                subjects=["segments.target"],
            )
        plan = layout.tensors.get(segment.name)
        if plan is None and not self._ignore.match(segment.name):
            raise unknown_tensor(segment.target, segment.name, layout.tensors)
        return plan

    def _check(self, segment: Segment, plan: TensorPlan, data: memoryview) -> None:
        if segment.shape != plan.shape:
            raise ShapeMismatchError(
                f"tensor {segment.name!r} of the {segment.target} has global shape"
                f" {list(plan.shape)} on the worker but was sent with {list(segment.shape)};"
                " shapes are never broadcast or cut",
                subjects=[segment.name],
            )
        allowed = self._request.cast is CastPolicy.ALLOW
        check_cast(segment.dtype, plan.dtype, allowed=allowed, name=segment.name)
        if segment.dtype is DType.BOOL and len(data) and np.frombuffer(data, np.uint8).max() > 1:
            raise InvalidRequestError(
                f"tensor {segment.name!r} is bool, but has bytes other than 0 and 1",
                subjects=["payload"],
            )
        if segment.placed:
            check_placed(segment, plan, self._arena)
        if self._request.shared_tensors is SharedTensorPolicy.REFUSE and self._homes.is_foreign(
            segment.key
        ):
            group = self._homes.shares.group(segment.key) or "in part"
            raise SharedWeightError(
                f"the draft's tensor {segment.name!r} is one storage with the verifier's ({group}):"
                " leave it out, send it in a session with both targets, or choose a policy for"
                " shared tensors",
                subjects=[segment.name],
            )

    def _claim(self, claim: Claim) -> None:
        """Take possession of what is to be copied."""
        with self._changed:
            # Another message that is copying into the same bytes has to be compared with.
            while not self._sealed and any(map(claim.meets, self._claims)):
                self._changed.wait()
            if self._sealed:
                raise SessionStateError("the session has ended and takes no more chunks")
            check_session(claim.copies, self._num_boxes)
            claim.compare()
            self._claims.append(claim)

    def _settle(
        self,
        claim: Claim,
        declared: Sequence[tuple[TensorKey, Region]] | None = None,
        ignored: Sequence[str] = (),
    ) -> None:
        """Give up possession; with `declared`, count the copies as made."""
        with self._changed:
            try:
                if declared is not None:
                    boxes, needed = claim.settle()
                    self._num_boxes += boxes
                    self._covered_bytes += needed
                for key, region in declared or ():
                    self._declared.setdefault(key, {})[region] = None
                for name in ignored:
                    if len(self._ignored) < MAX_IGNORED:
                        self._ignored[name] = None
            finally:
                self._claims.remove(claim)
                self._free_if_idle()
                self._changed.notify_all()

    # -- the end -------------------------------------------------------------------------------

    def seal(self) -> None:
        """Take no more; return when the last copy is done. Idempotent."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._claims)

    def close(self) -> None:
        """Take no more; give the memory back as soon as the last copy is done. Idempotent."""
        with self._changed:
            self._sealed = self._closed = True
            self._free_if_idle()
            self._changed.notify_all()

    def _free_if_idle(self) -> None:
        if self._closed and not self._claims and not self._freed:
            self._freed = True
            self._blocks.clear()
            self._budget.release(self._reserved)
            self._release()

    # -- where things lie ----------------------------------------------------------------------

    def _most_bytes(self, own: Mapping[ParameterKey, Iterable[Region]]) -> int:
        """Return how many bytes may come at most; `own` are the boxes of the session's targets."""
        if self._arena is not None:
            # Who maps the arena can fill all of it, whatever is said of it.
            return self._arena.size
        if self._request.shared_tensors is SharedTensorPolicy.REFUSE:
            return self._homes.nbytes(own)
        return self._homes.nbytes(self._homes.boxes(foreign=True))

    def _block(self, home: ParameterKey) -> Block:
        with self._changed:
            block = self._blocks.get(home)
            if block is None:
                spec = self._homes.spec(home)
                block = Block(
                    home,
                    spec.dtype,
                    self._memory(home, spec),
                    self._needed.get(home, ()),
                    foreign=self._homes.is_foreign_storage(home),
                )
                self._blocks[home] = block
            return block
