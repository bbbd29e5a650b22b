"""Live weights out: their list, their digests, their bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from weightsync.apply.gather import digest, held_regions, row_major
from weightsync.core.admission import Admission
from weightsync.core.errors import VersionChangedError
from weightsync.core.names import unknown_tensor
from weightsync.core.types import Limits, Segment, Target, TensorKey
from weightsync.core.views import TensorDigest, TensorInfo
from weightsync.layout.plan import Layout, TensorPlan
from weightsync.server.models import Models, Plan

Chunk = tuple[tuple[Segment, ...], list[memoryview], str]
"""Segments, their bytes, and the version that they are of."""

MAX_SEGMENTS = 1024
"""Most segments in a message that is sent: its table stays small beside the payload."""


class Reader:
    """Reads live weights while no commit changes them.

    Readers hold nothing up: one that a commit overtakes is told to start again.
    """

    def __init__(self, models: Models, lock: threading.Condition, limits: Limits) -> None:
        """Read some models; `lock` guards their books."""
        self._models = models
        self._lock = lock
        self._limits = limits
        self._readers = Admission("reading streams", limits.max_readers)
        self._changing = 0
        self._changes = 0

    @property
    def admission(self) -> Admission:
        """Lets a limited number of readers in."""
        return self._readers

    # -- the other side ------------------------------------------------------------------------

    def begin_change(self) -> None:
        """Tell that live weights are going to change: whoever reads them now must start again."""
        with self._lock:
            self._changing += 1
            self._changes += 1

    def end_change(self) -> None:
        """Tell that live weights are whole again."""
        with self._lock:
            self._changing -= 1

    @contextmanager
    def change(self) -> Iterator[None]:
        """Change live weights within the block."""
        self.begin_change()
        try:
            yield
        finally:
            self.end_change()

    # -- reading -------------------------------------------------------------------------------

    def tensors(self, targets: Sequence[Target]) -> Iterator[TensorInfo]:
        """Yield the tensors of some targets, in the order of the engine.

        Raises:
            TooManyStreamsError: too many are reading.
        """
        with self._readers:
            with self._lock:
                plan = self._models.refresh()
            for target in targets:
                for tensor in plan.layouts[target].tensors.values():
                    with self._lock:
                        written = self._models.is_written(target, tensor)
                    yield TensorInfo(
                        target,
                        tensor.name,
                        tensor.dtype,
                        tensor.shape,
                        tensor.regions,
                        plan.shares.group(TensorKey(target, tensor.name)),
                        written,
                        tensor.composite,
                        tensor.reloaded,
                    )

    def digests(self, targets: Sequence[Target], names: Sequence[str]) -> Iterator[TensorDigest]:
        """Yield the digest of each region held, of the named tensors or of all but composites.

        Raises:
            UnknownTensorError: the target has no such tensor.
            VersionChangedError: a commit came between.
            TooManyStreamsError: too many are reading.
        """
        with self._readers:
            plan, started = self._begin()
            for target in targets:
                version = self._version(target)
                live = self._models.live()[target]
                for tensor in _chosen(target, plan.layouts[target], names):
                    for region, placement in held_regions(tensor):
                        value = digest(live, placement)
                        self._check(started)
                        yield TensorDigest(
                            target, tensor.name, tensor.dtype, region, value, version
                        )

    def read(self, target: Target, names: Sequence[str]) -> Iterator[Chunk]:
        """Yield the bytes of each region held, in messages of at most `max_payload_bytes`.

        Buffers may be views of live memory: use them before the next is asked for.

        Raises:
            UnknownTensorError: the target has no such tensor.
            VersionChangedError: a commit came between.
            TooManyStreamsError: too many are reading.
        """
        with self._readers:
            plan, started = self._begin()
            version = self._version(target)
            limit = self._limits.max_payload_bytes
            segments: list[Segment] = []
            buffers: list[memoryview] = []
            size = 0
            for segment, buffer in self._runs(target, plan, names, limit):
                if size + len(buffer) > limit or len(segments) == MAX_SEGMENTS:
                    yield tuple(segments), buffers, version
                    # What was read is on its way: it must have been of one version.
                    self._check(started)
                    segments, buffers, size = [], [], 0
                segments.append(segment)
                buffers.append(buffer)
                size += len(buffer)
            if segments:
                yield tuple(segments), buffers, version
            self._check(started)

    def _runs(
        self, target: Target, plan: Plan, names: Sequence[str], limit: int
    ) -> Iterator[tuple[Segment, memoryview]]:
        live = self._models.live()[target]
        for tensor in _chosen(target, plan.layouts[target], names):
            for region, placement in held_regions(tensor):
                start = 0
                # An empty region is told of by a segment without bytes.
                pieces = row_major(live, placement) if region.numel else [np.empty(0, np.uint8)]
                for piece in pieces:
                    whole = piece.data
                    for first in range(0, max(len(whole), 1), limit):
                        buffer = whole[first : first + limit]
                        yield (
                            Segment(
                                target,
                                tensor.name,
                                tensor.dtype,
                                tensor.shape,
                                region,
                                start,
                                len(buffer),
                            ),
                            buffer,
                        )
                        start += len(buffer)

    def _begin(self) -> tuple[Plan, int]:
        with self._lock:
            self._check(self._changes)
            return self._models.plan, self._changes

    def _version(self, target: Target) -> str:
        with self._lock:
            return self._models.records[target].weight_version

    def _check(self, started: int) -> None:
        with self._lock:
            if self._changing or self._changes != started:
                raise VersionChangedError(
                    "the weights changed while they were read, or are being changed now; start"
                    " the read again",
                    retry_after=1.0,
                )


def _chosen(target: Target, layout: Layout, names: Sequence[str]) -> Iterator[TensorPlan]:
    if not names:
        yield from (tensor for tensor in layout.tensors.values() if not tensor.composite)
    for name in names:
        tensor = layout.tensors.get(name)
        if tensor is None:
            raise unknown_tensor(target, name, layout.tensors)
        yield tensor
