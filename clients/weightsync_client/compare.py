"""Do the workers hold what a source holds? Compared by digests, no weights travel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weightsync.core.dtypes import DType, check_cast
from weightsync.core.errors import ShapeMismatchError, VersionChangedError
from weightsync.core.regions import Region
from weightsync.core.types import Target
from weightsync.core.views import TensorDigest
from weightsync_client.credentials import Credentials
from weightsync_client.names import NameMapping
from weightsync_client.push import Workers, as_fleet
from weightsync_client.shards import Array, Shard, digest
from weightsync_client.sources import Source, shards
from weightsync_client.worker import Worker


@dataclass(frozen=True, slots=True)
class Difference:
    """A region of a tensor in which a worker's bytes are not the source's."""

    address: str
    target: Target
    name: str
    region: Region

    def __str__(self) -> str:
        """Return e.g. `unix:///run/w0: verifier:lm_head.weight[0:10, 0:4]`."""
        return f"{self.address}: {self.target}:{self.name}{self.region}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a comparison found.

    Attributes:
        compared: Regions whose digests were compared, over all workers.
        differences: Those that differ.
        not_compared: Tensors of the workers, e.g. `verifier:lm_head.weight`, that the source does
            not hold, or holds in parts smaller than a worker's region. Parts of a fused tensor
            are listed here if the source holds the fused one.
        weight_versions: What the target holds on each worker, by address.
    """

    compared: int
    differences: tuple[Difference, ...]
    not_compared: tuple[str, ...]
    weight_versions: Mapping[str, str]

    @property
    def equal(self) -> bool:
        """Tell whether all that was compared is equal, bit for bit."""
        return bool(self.compared) and not self.differences


def verify(
    workers: Workers,
    source: Source,
    *,
    target: Target = Target.VERIFIER,
    names: NameMapping | None = None,
    credentials: Credentials | None = None,
) -> VerifyReport:
    """Compare a source with what workers hold, by digests.

    Where the element types differ, the source is converted to the worker's first, as a session
    with `cast=ALLOW` does.

    Args:
        workers: An address, a connection, several of them, or a fleet.
        source: See `weightsync_client.sources`.
        target: The model that is compared.
        names: How the source's names become the workers'.
        credentials: Certificates and token for workers that are named by address.

    Raises:
        UnknownTensorError: no worker has a tensor of the source.
        ShapeMismatchError: a tensor has another shape on a worker.
        DTypeMismatchError: an element type can't be converted to the worker's.
        VersionChangedError: a commit came between.
    """
    mapping = names or NameMapping()
    with as_fleet(workers, credentials) as fleet:
        lives = [_Live(worker, target) for worker in fleet.workers]
        known = {name for live in lives for name in live.infos}
        for shard in shards(source):
            name = mapping.resolve(shard.name, target, known)
            if name is None:
                continue
            local = _Digests(shard)
            for live in lives:
                live.compare(name, local)
    return VerifyReport(
        sum(len(live.compared) for live in lives),
        tuple(difference for live in lives for difference in live.differences),
        tuple(sorted({f"{target}:{name}" for live in lives for name in live.not_compared()})),
        {live.worker.address: live.weight_version for live in lives},
    )


class _Digests:
    """Digests of a shard, by region and element type."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._arrays: dict[DType, Array] = {shard.array.dtype: shard.array}
        self._known: dict[tuple[DType, Region], bytes] = {}

    def of(self, region: Region, dtype: DType) -> bytes:
        if (dtype, region) not in self._known:
            if dtype not in self._arrays:
                check_cast(self.shard.array.dtype, dtype, allowed=True, name=self.shard.name)
                self._arrays[dtype] = self.shard.array.cast(dtype)
            box = region.relative_to(self.shard.region)
            self._known[dtype, region] = digest(self._arrays[dtype], box)
        return self._known[dtype, region]


class _Live:
    """What a worker says about a target."""

    def __init__(self, worker: Worker, target: Target) -> None:
        self.worker = worker
        self.compared: set[tuple[str, Region]] = set()
        self.differences: list[Difference] = []
        self.weight_version = ""
        self._target = target
        self.infos = {info.name: info for info in worker.tensors([target])}
        self._digests: dict[str, list[TensorDigest]] = {}
        self._add(worker.digests([target]))

    def compare(self, name: str, local: _Digests) -> None:
        info = self.infos.get(name)
        if info is None:
            return
        if info.shape != local.shard.shape:
            raise ShapeMismatchError(
                f"tensor {name!r} has the shape {list(info.shape)} on {self.worker.address}, and "
                f"{list(local.shard.shape)} in the source",
                subjects=[name],
            )
        if name not in self._digests:
            # Composites are digested when they are asked for.
            self._add(self.worker.digests([self._target], [name]))
        for live in self._digests.get(name, ()):
            if live.region.intersect(local.shard.region) != live.region:
                continue
            self.compared.add((name, live.region))
            if local.of(live.region, live.dtype) != live.xxh3_128:
                self.differences.append(
                    Difference(self.worker.address, self._target, name, live.region)
                )

    def not_compared(self) -> Iterator[str]:
        for name, info in self.infos.items():
            if not info.composite and any((name, r) not in self.compared for r in info.regions):
                yield name

    def _add(self, digests: Iterator[TensorDigest]) -> None:
        for found in digests:
            first = not self._digests
            self._digests.setdefault(found.name, []).append(found)
            if first:
                self.weight_version = found.weight_version
            elif found.weight_version != self.weight_version:
                raise VersionChangedError(
                    f"{self.worker.address} went from version {self.weight_version!r} to "
                    f"{found.weight_version!r} meanwhile; compare again",
                    worker=self.worker.address,
                )
