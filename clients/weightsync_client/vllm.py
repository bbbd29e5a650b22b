"""A vLLM that runs the service: finding its workers, and a commit in its own order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from weightsync.core.errors import EngineUnavailableError, InvalidRequestError
from weightsync.core.rankfile import RankFile
from weightsync.core.types import Target, UpdateRequest
from weightsync_client.vllm_server import VllmServer
from weightsync_client.worker import Worker

_PAUSE = 0.1

Commit: TypeAlias = Callable[[UpdateRequest, Sequence[str]], object]
"""Lets an engine commit prepared sessions, one of each worker, on all of them at once."""


class UpdateCalls(Protocol):
    """The calls by which vLLM updates its weights, as its `VLLMWeightSyncClient` has them."""

    def start_weight_update(self) -> None:
        """Begin an update of the verifier."""

    def update_weights(self, update_info: Any, /) -> None:  # noqa: ANN401 - as vLLM has it
        """Commit; `update_info` has an entry for each rank."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and say what the weights are."""


class DraftUpdateCalls(UpdateCalls, Protocol):
    """The same with the call for drafts."""

    def start_draft_weight_update(self) -> None:
        """Begin an update of the draft."""


class FoundEngine(DraftUpdateCalls, Protocol):
    """A vLLM that can be called, and asked where its ranks are: a `VllmServer`, say."""

    def ranks(self, timeout: float) -> list[RankFile]:
        """Return where the service of each rank can be reached from here."""


def find(
    where: str | Path | FoundEngine, timeout: float, api_key: str | None = None
) -> tuple[list[RankFile], Commit | None]:
    """Return where the ranks of a vLLM are, and how it commits, if it can be called.

    Args:
        where: As for `Fleet.from_vllm`.
        timeout: Seconds to wait for a vLLM that is still loading.
        api_key: For a server.

    Raises:
        WeightSyncError: see `Fleet.from_vllm`.
    """
    if isinstance(where, str) and "://" in where:
        where = VllmServer(where, api_key=api_key)
    if isinstance(where, str | Path):
        return wait_for_ranks(Path(where), timeout), None
    engine = where
    return engine.ranks(timeout), lambda request, ids: commit_in_order(engine, request, ids)


def commit_in_order(
    engine: UpdateCalls, request: UpdateRequest, session_ids: Sequence[str]
) -> None:
    """Let vLLM commit prepared sessions, by its own calls in their order.

    vLLM's version is that of the verifier, so that an update of the draft alone leaves it.

    Args:
        engine: What to call.
        request: What the sessions were asked for.
        session_ids: One per rank.

    Raises:
        InvalidRequestError: a draft alone is updated, and `engine` has no call for that.
        Exception: what a call raised.
    """
    if Target.VERIFIER in request.targets:
        engine.start_weight_update()
        version = request.weight_version
    else:
        draft_calls(engine).start_draft_weight_update()
        version = None
    engine.update_weights([{"session_id": one} for one in session_ids])
    engine.finish_weight_update(version)


def draft_calls(engine: UpdateCalls) -> DraftUpdateCalls:
    """Return what can be called for a draft.

    Raises:
        InvalidRequestError: nothing can.
    """
    if not hasattr(engine, "start_draft_weight_update"):
        raise InvalidRequestError(
            f"a {type(engine).__name__} has no start_draft_weight_update; use the VllmServer of"
            " weightsync_client, or what weightsync.integrations.vllm.clients has around an engine",
            subjects=["client"],
        )
    return engine  # type: ignore[return-value] # just looked at


def wait_for_ranks(directory: Path, timeout: float) -> list[RankFile]:
    """Return where the ranks listen, by rank, as soon as all of them have said so.

    Raises:
        EngineUnavailableError: not within `timeout` seconds.
        InvalidRequestError: a file in the directory says something else.
    """
    end = time.monotonic() + timeout
    while (ranks := RankFile.read_all(directory)) is None:
        if time.monotonic() > end:
            raise EngineUnavailableError(
                f"not all ranks have said in {directory} where they listen, within {timeout:g} s;"
                ' is it the "directory" that vLLM was started with?',
                retry_after=timeout,
            )
        time.sleep(_PAUSE)
    return ranks


def check_ranks(ranks: Sequence[RankFile], workers: Sequence[Worker]) -> None:
    """See whether those who answer are those who have written the files.

    Raises:
        InvalidRequestError: another service has taken the address of a rank that is gone.
        ConnectionLostError: a rank does not answer.
    """
    for rank, worker in zip(ranks, workers, strict=True):
        if worker.info().instance_id != rank.instance_id:
            raise InvalidRequestError(
                f"at {rank.address} is not the service {rank.instance_id} of rank {rank.rank} any"
                " more; remove the files that an old engine has left",
                subjects=["directory"],
            )
