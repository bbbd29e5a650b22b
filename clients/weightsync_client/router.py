"""From the shards of a source to messages for groups of workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weightsync.core.errors import InvalidRequestError, OverlapConflictError, UnknownTensorError
from weightsync.core.names import IgnorePatterns
from weightsync.core.regions import Region
from weightsync.core.types import Target, TensorKey
from weightsync_client.chunker import Chunker, Message
from weightsync_client.names import NameMapping
from weightsync_client.planner import Delivery, Planner
from weightsync_client.shards import Shard, digest

Workers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """What went out so far: distinct tensors, and names that were ignored."""

    tensors: set[TensorKey] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)


class Router:
    """Names, plans and cuts shards; each message is put together once for all that need it."""

    def __init__(
        self,
        planner: Planner,
        ignore_names: tuple[str, ...],
        open_chunker: Callable[[Callable[[Message], None]], Chunker],
        emit: Callable[[Workers, Message], None],
    ) -> None:
        """Start with nothing sent.

        Args:
            planner: Knows what the workers need.
            ignore_names: Patterns of names that no worker needs to have.
            open_chunker: Makes a chunker that emits to a function.
            emit: Takes a message and the indices of the workers that it is for.
        """
        self.sent = Sent()
        self._planner = planner
        self._ignored = IgnorePatterns(ignore_names)
        self._open_chunker = open_chunker
        self._emit = emit
        self._chunkers: dict[Workers, Chunker] = {}
        self._sources: dict[TensorKey, str] = {}
        self._tied: dict[tuple[Workers, TensorKey, Region], tuple[TensorKey, bytes]] = {}

    def route(self, shard: Shard, target: Target, names: NameMapping) -> None:
        """Send a shard to those who need it.

        Raises:
            UnknownTensorError: no worker has such a tensor, and no pattern ignores it.
            InvalidRequestError: another name of the source became the same tensor.
            OverlapConflictError: names of one storage came with different bytes.
            WeightSyncError: shapes or element types do not fit, or what the workers say.
        """
        key = self._key(shard.name, target, names)
        if key is None:
            return
        self._check_collision(key, shard.name)
        array = shard.array
        for delivery in self._planner.plan(key, array.dtype, shard.shape, shard.region):
            self.sent.tensors.add(delivery.key)
            chunker = self._chunker(delivery.workers)
            for box in delivery.boxes:
                if delivery.tied and self._came_before(delivery, box, shard, key):
                    continue
                chunker.add(delivery.key, delivery.shape, box, array, shard.region)

    def own(self) -> None:
        """Copy what waits in unfinished messages: the source may change from now on."""
        for chunker in self._chunkers.values():
            chunker.own()

    def flush(self) -> None:
        """Send unfinished messages."""
        for chunker in self._chunkers.values():
            chunker.flush()

    def _key(self, name: str, target: Target, names: NameMapping) -> TensorKey | None:
        try:
            resolved = names.resolve(name, target, self._planner.names(target))
        except UnknownTensorError:
            if not self._ignored.match(name):
                raise
            self.sent.ignored.add(name)
            return None
        return TensorKey(target, resolved) if resolved is not None else None

    def _check_collision(self, key: TensorKey, name: str) -> None:
        first = self._sources.setdefault(key, name)
        if first != name:
            raise InvalidRequestError(
                f"{first!r} and {name!r} are both the worker's {key}; leave one out, or map it "
                f"to another name",
                subjects=[first, name],
            )

    def _chunker(self, workers: Workers) -> Chunker:
        if workers not in self._chunkers:
            self._chunkers[workers] = self._open_chunker(
                lambda message: self._emit(workers, message)
            )
        return self._chunkers[workers]

    def _came_before(self, delivery: Delivery, box: Region, shard: Shard, key: TensorKey) -> bool:
        """Tell whether another name of the storage has brought these bytes."""
        value = digest(shard.array, box.relative_to(shard.region))
        place = (delivery.workers, delivery.key, box)
        first, seen = self._tied.setdefault(place, (key, value))
        if first == key:
            return False
        if seen != value:
            raise OverlapConflictError(
                f"{first} and {key} are one storage on the worker, but what was pushed for them "
                f"differs in {box}; push one of them, or serve models that do not share it",
                subjects=[str(first), str(key)],
            )
        return True
