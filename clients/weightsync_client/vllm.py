"""Finding the workers of a vLLM that runs the service."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from weightsync.core.errors import EngineUnavailableError, InvalidRequestError
from weightsync.core.rankfile import RankFile
from weightsync_client.worker import Worker

_PAUSE = 0.1


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
