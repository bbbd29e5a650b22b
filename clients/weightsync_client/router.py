"""From the shards of a source to messages for groups of workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from weightsync.core.errors import InvalidRequestError, OverlapConflictError, UnknownTensorError
from weightsync.core.names import IgnorePatterns
from weightsync.core.regions import Region
from weightsync.core.types import Target, TensorKey
from weightsync_client.carrier import Carrier
from weightsync_client.chunker import Message
from weightsync_client.names import NameMapping
from weightsync_client.planner import Delivery, Planner
from weightsync_client.shards import Shard, digest

Workers = tuple[int, ...]

Emit = Callable[[Workers, Message, bool], None]
"""Takes the indices of workers, a message for them, and whether its bytes go to no one before:
they are counted once, however many workers need them."""


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
        open_carrier: Callable[[Workers, Callable[[Message], None]], Carrier],
        emit: Emit,
        alone: Collection[int] = (),
    ) -> None:
        """Start with nothing sent.

        Args:
            planner: Knows what the workers need.
            ignore_names: Patterns of names that no worker needs to have.
            open_carrier: Makes a carrier to workers, which emits messages to a function.
            emit: Takes each message.
            alone: Workers that need carriers of their own: no message of theirs fits others.
        """
        self.sent = Sent()
        self._planner = planner
        self._ignored = IgnorePatterns(ignore_names)
        self._open_carrier = open_carrier
        self._emit = emit
        self._alone = frozenset(alone)
        self._carriers: dict[tuple[Workers, bool], Carrier] = {}
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
            for box in delivery.boxes:
                if delivery.tied and self._came_before(delivery, box, shard, key):
                    continue
                for carrier in self._carriers_to(delivery.workers):
                    carrier.add(delivery.key, delivery.shape, box, array, shard.region)

    def own(self) -> None:
        """Copy what waits in unfinished messages: the source may change from now on."""
        for carrier in self._carriers.values():
            carrier.own()

    def flush(self) -> None:
        """Send unfinished messages."""
        for carrier in self._carriers.values():
            carrier.flush()

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

    def _carriers_to(self, workers: Workers) -> Iterator[Carrier]:
        groups: list[Workers] = [(worker,) for worker in workers if worker in self._alone]
        if together := tuple(worker for worker in workers if worker not in self._alone):
            groups.insert(0, together)
        for group in groups:
            yield self._carrier(group, first=group is groups[0])

    def _carrier(self, workers: Workers, *, first: bool) -> Carrier:
        if (workers, first) not in self._carriers:
            self._carriers[workers, first] = self._open_carrier(
                workers, lambda message: self._emit(workers, message, first)
            )
        return self._carriers[workers, first]

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
