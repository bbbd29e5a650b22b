"""A commit that vLLM calls on all ranks: all of them switch between the same two steps, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.distributed.parallel_state import get_world_group

from weightsync.core.errors import EngineUnavailableError
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.integrations.vllm.ballot import Ballot
from weightsync.server.worker import Worker


def commit(worker: Worker, engine: VllmEngine, find_session: Callable[[], str]) -> None:
    """Make a session live on this rank, if all other ranks do so with theirs.

    Args:
        worker: This rank's.
        engine: The engine of that worker.
        find_session: Returns this rank's session.

    Raises:
        WeightSyncError: as FinishWeightUpdate in the contract, on the rank that had the trouble.
        EngineUnavailableError: another rank is not ready; nothing was changed.
        CommitRolledBackError: another rank could not switch; the old version is back.
    """
    with engine.gate.driven():
        session_id = _all_ready(worker, find_session)
        with _all_or_none(worker, engine):
            worker.finish(session_id)


def _all_ready(worker: Worker, find_session: Callable[[], str]) -> str:
    ballot = _ballot()
    try:
        session_id = find_session()
        worker.prepare(session_id)
    except BaseException:
        ballot.cast(ok=False)
        raise
    if not ballot.cast(ok=True):
        raise EngineUnavailableError(
            "another rank is not ready to commit, so that nothing was changed here; its own error"
            " says why"
        )
    return session_id


@contextmanager
def _all_or_none(worker: Worker, engine: VllmEngine) -> Iterator[None]:
    ballot = _ballot()

    def agree() -> None:
        if not ballot.cast(ok=True):
            raise EngineUnavailableError("another rank could not switch")

    def give_up(step: str, _facts: dict[str, object]) -> None:
        if step == "rollback.started":
            ballot.cast(ok=False)

    remove = worker.trace.add(give_up)
    try:
        with engine.agreeing(agree):
            yield
    finally:
        remove()
        # Who was refused before the first write must not let the others wait.
        ballot.cast(ok=False)


def _ballot() -> Ballot:
    return Ballot(get_world_group().cpu_group)
