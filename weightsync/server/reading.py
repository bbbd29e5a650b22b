"""Live weights out: their list, their digests, their bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from weightsync.apply.gather import digest, held_regions, row_major
from weightsync.core.admission import Admission
from weightsync.core.errors import EngineUnavailableError, VersionChangedError
from weightsync.core.names import unknown_tensor
from weightsync.core.types import Limits, Segment, Target, TargetState, TensorKey
from weightsync.core.views import TensorDigest, TensorInfo
from weightsync.layout.plan import Layout, TensorPlan
from weightsync.server.models import Models, Plan

T = TypeVar("T")

Parts = tuple[tuple[Segment, ...], list[memoryview]]
"""Segments and their bytes, which may be views of live memory."""

LARGEST_ELEMENT = 16
"""Bytes of a complex128."""

MAX_SEGMENTS = 1024
"""Most segments in a message that is sent: its table stays small beside the payload."""


class Reader:
    """Reads live weights while no commit changes them, and while they are there.

    Readers hold no commit up: one that is overtaken is told to start again. What frees the memory
    waits for the message that is being put together, and for no client.
    """

    def __init__(self, models: Models, lock: threading.Condition, limits: Limits) -> None:
        """Read some models; `lock` guards their books."""
        self._models = models
        self._lock = lock
        self._limits = limits
        self._readers = Admission("reading streams", limits.max_readers)
        self._changing = 0
        self._changes = 0
        self._looks = 0

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
            self._lock.notify_all()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Change live weights within the block."""
        self.begin_change()
        try:
            yield
        finally:
            self.end_change()

    def wait_until_unused(self) -> None:
        """Return when nobody reads or changes live weights any more; the targets sleep already."""
        with self._lock:
            self._lock.wait_for(lambda: not self._looks and not self._changing)

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
            EngineUnavailableError: the engine sleeps.
            TooManyStreamsError: too many are reading.
        """
        with self._readers:
            plan, started = self._begin()
            for target in targets:
                version = self._version(target)
                live = self._models.live()[target]
                for tensor in _chosen(target, plan.layouts[target], names):
                    for region, placement in held_regions(tensor):
                        with self._looking(started):
                            value = digest(live, placement)
                        yield TensorDigest(
                            target, tensor.name, tensor.dtype, region, value, version
                        )

    def read(
        self,
        target: Target,
        names: Sequence[str],
        encode: Callable[[Sequence[Segment], Sequence[memoryview], str], T],
    ) -> Iterator[T]:
        """Yield the bytes of each region held, in messages of at most `max_payload_bytes`.

        Args:
            target: Whose.
            names: Of tensors; none: all but composites.
            encode: Makes a message of segments, their bytes, and the version that they are of.
                The buffers may be views of live memory and must not be kept.

        Raises:
            UnknownTensorError: the target has no such tensor.
            VersionChangedError: a commit came between.
            EngineUnavailableError: the engine sleeps.
            TooManyStreamsError: too many are reading.
        """
        with self._readers:
            plan, started = self._begin()
            version = self._version(target)
            messages = self._messages(target, plan, names)
            while True:
                # Put together here, since whoever asks for the next may take his time.
                with self._looking(started):
                    parts = next(messages, None)
                    message = encode(*parts, version) if parts is not None else None
                if message is None:
                    return
                yield message

    def _messages(self, target: Target, plan: Plan, names: Sequence[str]) -> Iterator[Parts]:
        # No element lies in two messages.
        limit = self._limits.max_payload_bytes // LARGEST_ELEMENT * LARGEST_ELEMENT
        segments: list[Segment] = []
        buffers: list[memoryview] = []
        size = 0
        for segment, buffer in self._runs(target, plan, names, limit):
            if size + len(buffer) > limit or len(segments) == MAX_SEGMENTS:
                yield tuple(segments), buffers
                segments, buffers, size = [], [], 0
            segments.append(segment)
            buffers.append(buffer)
            size += len(buffer)
        if segments:
            yield tuple(segments), buffers

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

    @contextmanager
    def _looking(self, started: int) -> Iterator[None]:
        """Look at live memory within the block; behind it, what was seen is of one version."""
        with self._lock:
            self._check(started)
            self._looks += 1
        try:
            yield
        finally:
            with self._lock:
                self._looks -= 1
                self._lock.notify_all()
        with self._lock:
            self._check(started)

    def _check(self, started: int) -> None:
        if any(r.state is TargetState.ASLEEP for r in self._models.records.values()):
            raise EngineUnavailableError(
                "the engine sleeps, and its weights can't be read", retry_after=1.0
            )
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
