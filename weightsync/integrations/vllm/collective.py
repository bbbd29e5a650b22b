"""A commit that vLLM calls on all ranks: all of them switch between the same two steps, or none."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from weightsync.core.errors import EngineUnavailableError
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.integrations.vllm.ballot import Ballot
from weightsync.server.worker import Worker


def commit(
    worker: Worker, engine: VllmEngine, find_session: Callable[[], str], group: dist.ProcessGroup
) -> None:
    """Make a session live on this rank, if all other ranks do so with theirs.

    Args:
        worker: This rank's.
        engine: The engine of that worker.
        find_session: Returns this rank's session.
        group: All ranks, in host memory.

    Raises:
        WeightSyncError: as FinishWeightUpdate in the contract, on the rank that had the trouble.
        EngineUnavailableError: another rank is not ready; nothing was changed.
        CommitRolledBackError: another rank could not switch; the old version is back.
    """
    with engine.gate.driven():
        session_id = _all_ready(worker, find_session, Ballot(group))
        _all_or_none(worker, engine, session_id, Ballot(group))


def _all_ready(worker: Worker, find_session: Callable[[], str], ballot: Ballot) -> str:
    try:
        session_id = find_session()
        worker.prepare(session_id)
    except Exception as error:
        ballot.cast(str(error))
        raise
    if troubles := ballot.cast():
        raise EngineUnavailableError(
            f"not all ranks are ready to commit, and nothing was changed: {'; '.join(troubles)}"
        )
    return session_id


def _all_or_none(worker: Worker, engine: VllmEngine, session_id: str, ballot: Ballot) -> None:
    def agree(trouble: str) -> None:
        if ballot.over:
            return  # it is being taken back
        troubles = ballot.cast(trouble)
        if troubles and not trouble:
            raise EngineUnavailableError(f"not all ranks could switch: {'; '.join(troubles)}")

    def give_up(step: str, _facts: dict[str, object]) -> None:
        if step == "rollback.started":
            ballot.cast("its weights could not be written")

    remove = worker.trace.add(give_up)
    try:
        with engine.agreeing(agree):
            worker.finish(session_id)
    except Exception as error:
        # Who was refused before the first write must not let the others wait.
        ballot.cast(str(error))
        raise
    finally:
        remove()
