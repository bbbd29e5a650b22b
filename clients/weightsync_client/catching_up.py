"""A worker that came late gets from a running one what that one holds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from weightsync.core.errors import (
    InternalError,
    InvalidRequestError,
    QuarantinedError,
    VersionChangedError,
)
from weightsync.core.regions import Region
from weightsync.core.types import SharedTensorPolicy, Target, TargetState
from weightsync_client.credentials import Credentials
from weightsync_client.fleet import Fleet
from weightsync_client.member import SendOptions
from weightsync_client.report import Outcome, WorkerReport
from weightsync_client.sources.peer import peer_shards
from weightsync_client.worker import Worker

_ATTEMPTS = 5

Digests = dict[tuple[Target, str, Region], bytes]


def catch_up(
    worker: Worker | str,
    peer: Worker | str,
    *,
    shared_tensors: SharedTensorPolicy = SharedTensorPolicy.ACCEPT_EQUAL,
    options: SendOptions | None = None,
    credentials: Credentials | None = None,
) -> WorkerReport:
    """Bring a worker to the versions that a peer holds, by reading the peer's live weights.

    For a worker that was restarted, or joins late, while no trainer is at hand. The peer serves
    on; if a commit on it comes between, it is read again. Afterwards the digests of both are
    compared.

    Args:
        worker: The one that lacks the peer's versions, by address or connection.
        peer: One that holds what this worker needs: the same ranks of the same models.
        shared_tensors: For a draft whose version is not the verifier's, if the worker keeps both
            models' equal tensors once: equal bytes are fine, `UNSHARE` cuts the draft loose.
        options: How bytes travel.
        credentials: Certificates and token, for those that are named by address.

    Returns:
        What the worker holds now; `HELD` if it needed nothing.

    Raises:
        InvalidRequestError: the peer holds no version of a target that the worker has.
        QuarantinedError: the peer's weights are not known to be whole.
        VersionChangedError: the peer changed again and again while it was read.
        InternalError: the digests differ afterwards.
        WeightSyncError: one of the two can't be reached, or refused.
    """
    with (
        Fleet([worker], credentials=credentials) as late,
        Fleet([peer], credentials=credentials) as running,
    ):
        return _CatchUp(late, running.workers[0], shared_tensors, options).run()


class _CatchUp:
    def __init__(
        self,
        late: Fleet,
        peer: Worker,
        shared_tensors: SharedTensorPolicy,
        options: SendOptions | None,
    ) -> None:
        self._late = late
        self._worker = late.workers[0]
        self._peer = peer
        self._shared_tensors = shared_tensors
        self._options = options

    def run(self) -> WorkerReport:
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._attempt()
            except VersionChangedError as error:  # noqa: PERF203
                time.sleep(error.retry_after or 0.0)
        return self._attempt()

    def _attempt(self) -> WorkerReport:
        report = self._report(Outcome.HELD)
        wanted = self._versions(report.weight_versions)
        # One session for what is of one version. The verifier's first: a draft may share its own.
        for version in dict.fromkeys(wanted.values()):
            targets = [target for target, held in wanted.items() if held == version]
            self._copy(version, targets, report.weight_versions)
            report = self._report(Outcome.COMMITTED)
        return report

    def _report(self, outcome: Outcome) -> WorkerReport:
        held = {s.target: s.weight_version for s in self._worker.info().targets}
        return WorkerReport(self._worker.address, "", outcome, held)

    def _versions(self, held: Mapping[Target, str]) -> dict[Target, str]:
        """Return what the worker lacks: the peer's versions of the targets that it has."""
        statuses = {status.target: status for status in self._peer.info().targets}
        wanted = {}
        for target in held:
            status = statuses.get(target)
            if status is not None and status.state is TargetState.QUARANTINED:
                raise QuarantinedError(
                    f"the {target} of {self._peer.address} is quarantined"
                    f" ({status.quarantine_reason}); catch up from another peer",
                    subjects=[str(target)],
                )
            if status is None or not status.weight_version:
                raise InvalidRequestError(
                    f"{self._peer.address} holds no version of the {target}; catch up from"
                    " another peer, or push from a trainer",
                    subjects=[str(target)],
                )
            if status.weight_version != held[target]:
                wanted[target] = status.weight_version
        return wanted

    def _copy(self, version: str, targets: list[Target], held: Mapping[Target, str]) -> None:
        expected = self._digests(self._peer, version, targets)
        with self._late.update(
            version=version,
            target=targets,
            # Whoever was quicker knows better.
            expected_base_versions={target: held[target] for target in targets},
            shared_tensors=self._shared_tensors,
            holder=f"catch-up from {self._peer.address}",
            options=self._options,
        ) as session:
            for target in targets:
                session.push(peer_shards(self._peer, target, version), target=target)
        found = self._digests(self._worker, version, targets)
        differ = [key for key in found if expected.get(key, found[key]) != found[key]]
        if differ:
            names = ", ".join(f"{target}:{name}{region}" for target, name, region in differ[:10])
            raise InternalError(
                f"{self._worker.address} does not hold what {self._peer.address} holds of"
                f" {version!r}: {names}; push from a trainer"
            )

    def _digests(self, worker: Worker, version: str, targets: Iterable[Target]) -> Digests:
        digests: Digests = {}
        for digest in worker.digests(targets):
            if digest.weight_version != version:
                raise VersionChangedError(
                    f"{worker.address} holds {digest.weight_version!r} instead of {version!r} by"
                    " now",
                    worker=worker.address,
                )
            digests[digest.target, digest.name, digest.region] = digest.xxh3_128
        return digests
