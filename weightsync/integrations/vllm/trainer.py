"""The trainer's end of the backend, as vLLM's trainers use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from weightsync_client.credentials import Credentials
from weightsync_client.fleet import Fleet
from weightsync_client.report import FleetReport
from weightsync_client.vllm import commit_in_order, draft_calls

from weightsync.core.errors import InvalidRequestError
from weightsync.core.types import Target
from weightsync.integrations.vllm.plugin import BACKEND, register_trainer

if TYPE_CHECKING:
    from typing_extensions import Self

Pairs: TypeAlias = Iterable[tuple[str, torch.Tensor]]


@dataclass
class TrainerInfo(TrainerInitInfo):
    """Where the workers are, and how they are updated.

    Attributes:
        workers: The URL of vLLM's server; or the `directory` that its ranks write to; or their
            addresses, by rank. None: the client is asked, see `weightsync_client.vllm_server` and
            `weightsync.integrations.vllm.clients`.
        first_version: Versions that nobody names are counted up from it.
        timeout: Seconds to wait for a vLLM that is still loading.
        api_key: What a server was given as `--api-key`.
        credentials: Certificates and token, if the ranks want any.
        update: Further arguments of `Fleet.update`, e.g. `{"cast": CastPolicy.ALLOW}`.
    """

    backend: ClassVar[str] = BACKEND

    workers: str | Path | Sequence[str] | None = None
    first_version: int = 1
    timeout: float = 60.0
    api_key: str | None = field(default=None, repr=False)
    credentials: Credentials | None = None
    update: Mapping[str, Any] = field(default_factory=dict)


class WeightSyncTrainer(TrainerWeightTransferEngine[TrainerInfo]):
    """Sends weights to all ranks over gRPC, and has vLLM commit them between the same two steps.

    Requests in flight go on meanwhile. An update that fails has changed nothing; the next one may
    follow at once. On ranks of the trainer that are no senders, methods only iterate the sources,
    whose iteration may be a collective, and return None.
    """

    init_info_cls = TrainerInfo

    def __init__(
        self, info: TrainerInfo, client: VLLMWeightSyncClient, source: WeightSource | None
    ) -> None:
        """Find the workers, if this rank is the sender.

        Raises:
            WeightSyncError: see `Fleet.from_vllm`.
        """
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._update = info.update
        self._next = info.first_version
        self._found = _find(info, client) if info.is_sender else None

    @property
    def fleet(self) -> Fleet:
        """The workers.

        Raises:
            InvalidRequestError: this rank of the trainer is not the sender.
        """
        if self._found is None:
            raise InvalidRequestError("only rank 0 of the trainer has the workers")
        return self._found

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Return an engine that is ready to send.

        Args:
            init_info: Where the workers are.
            client: Calls vLLM; the drafts' methods need one with `start_draft_weight_update`.
            source: The verifier's weights.

        Raises:
            WeightSyncError: see `Fleet.from_vllm`.
        """
        made = cls(init_info, client, source)
        if made.is_sender:
            client.init_weight_transfer_engine({})
        return made

    def send_weights(
        self, version: str | None = None, *, draft: Pairs | None = None
    ) -> FleetReport | None:
        """Make the source's weights live, and a draft's in the same step if one is given.

        Args:
            version: What vLLM and the workers then hold; None: the next number.
            draft: The draft's weights.

        Raises:
            InvalidRequestError: there is no source.
            WeightSyncError: see `Session.push` and `Session.finish`.
            Exception: what the client or a source raised; nothing has changed.
        """
        if self.source is None:
            raise InvalidRequestError(
                "trainer_init was given no source: there are no weights of the verifier to send",
                subjects=["source"],
            )
        sources: dict[Target, Pairs] = {Target.VERIFIER: self.source}
        if draft is not None:
            sources[Target.DRAFT] = draft
        return self._send(sources, version)

    def send_draft_weights(self, draft: Pairs, version: str | None = None) -> FleetReport | None:
        """Make a draft's weights live; vLLM's own version, which is the verifier's, stays.

        Args:
            draft: Its weights.
            version: What the drafts of the workers then hold; None: the next number.

        Raises:
            InvalidRequestError: the client has no call for drafts.
            Exception: as `send_weights`.
        """
        if self.is_sender:
            draft_calls(self.client)
        return self._send({Target.DRAFT: draft}, version)

    def shutdown(self) -> None:
        """Close the connections. The workers serve on."""
        if self._found is not None:
            self._found.close()

    def _send(self, sources: Mapping[Target, Pairs], version: str | None) -> FleetReport | None:
        passes = {target: iter(source) for target, source in sources.items()}
        try:
            if not self.is_sender:
                return None
            report = self._commit(passes, version or str(self._next))
        finally:
            # Other ranks are in the middle of theirs: one that stopped would let them wait.
            for rest in passes.values():
                for _ in rest:
                    pass
        self._next += version is None
        return report

    def _commit(self, sources: Mapping[Target, Pairs], version: str) -> FleetReport:
        with self.fleet.update(version=version, target=sources, **self._update) as session:
            for target, source in sources.items():
                session.push(source, target=target)
            request = session.ticket.request
            return session.finish(lambda ids: commit_in_order(self.client, request, ids))


def _find(info: TrainerInfo, client: VLLMWeightSyncClient) -> Fleet:
    where = info.workers
    if where is None:
        if not hasattr(client, "ranks"):
            raise InvalidRequestError(
                f"a {type(client).__name__} does not know where the workers listen: say it as"
                " `workers`",
                subjects=["workers"],
            )
        where = client
    elif not isinstance(where, str | Path):
        return Fleet(where, credentials=info.credentials)
    return Fleet.from_vllm(where, info.timeout, api_key=info.api_key, credentials=info.credentials)


# In a trainer's process there is no engine that would load vLLM's plugins.
register_trainer()
