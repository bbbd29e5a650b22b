"""An engine in this program, by the calls that trainers know."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

from weightsync.core.errors import EngineUnavailableError, UnsupportedError
from weightsync.core.rankfile import RankFile

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

_METHOD = "weightsync_rank"


class LLMClient:
    """The weight updates of an `LLM`: vLLM's `VLLMWeightSyncClient`, and the draft's.

    Calls run in the thread of the caller, which must be the one that generates.
    """

    def __init__(self, llm: LLM) -> None:
        """Name an engine."""
        self._llm = llm

    def ranks(self, timeout: float) -> list[RankFile]:
        """Return where the service of each rank listens; wait `timeout` seconds for the answer.

        Raises:
            UnsupportedError: the engine runs without the service, or is one of several.
        """
        _check_backend(self._llm.llm_engine.vllm_config)
        return RankFile.parse_all(self._llm.collective_rpc(_METHOD, timeout=timeout), "the LLM")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing in the engine: its services run already."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update of the verifier."""
        self._llm.start_weight_update()

    def start_draft_weight_update(self) -> None:
        """Begin an update of the draft."""
        self._llm.start_draft_weight_update()

    def update_weights(self, update_info: Any) -> None:  # noqa: ANN401 - as vLLM has it
        """Commit a session on all ranks."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and say what the weights are."""
        self._llm.finish_weight_update(weight_version)


class AsyncLLMClient:
    """The same of an `AsyncLLM`, for another thread than that of its event loop.

    Each call raises `EngineUnavailableError` if there is no answer in time.
    """

    def __init__(
        self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop, timeout: float = 300.0
    ) -> None:
        """Name an engine and the loop that it runs in; `timeout`: of each call, in seconds."""
        self._engine = engine
        self._loop = loop
        self._timeout = timeout

    def ranks(self, timeout: float) -> list[RankFile]:
        """Return where the service of each rank listens; wait `timeout` seconds for the answer.

        Raises:
            UnsupportedError: the engine runs without the service, or is one of several.
        """
        _check_backend(self._engine.vllm_config)
        results = self._wait(lambda: self._engine.collective_rpc(_METHOD, timeout))
        return RankFile.parse_all(results, "the AsyncLLM")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing in the engine: its services run already."""
        request = WeightTransferInitRequest(init_info=init_info)
        self._wait(lambda: self._engine.init_weight_transfer_engine(request))

    def start_weight_update(self) -> None:
        """Begin an update of the verifier."""
        self._wait(self._engine.start_weight_update)

    def start_draft_weight_update(self) -> None:
        """Begin an update of the draft."""
        self._wait(self._engine.start_draft_weight_update)

    def update_weights(self, update_info: Any) -> None:  # noqa: ANN401 - as vLLM has it
        """Commit a session on all ranks."""
        request = WeightTransferUpdateRequest(update_info=update_info)
        self._wait(lambda: self._engine.update_weights(request))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and say what the weights are."""
        self._wait(lambda: self._engine.finish_weight_update(weight_version))

    def _wait(self, call: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401 - of any call
        async def awaited() -> Any:  # noqa: ANN401
            return await call()

        future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return future.result(self._timeout)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise EngineUnavailableError(
                f"vLLM has not answered within {self._timeout:g} s; is this call made in the thread"
                " of its event loop, which then can't run?",
                retry_after=1.0,
            ) from error


def _check_backend(config: Any) -> None:  # noqa: ANN401 - of vLLM
    # Asking workers for what they don't have would leave answers of some ranks unread.
    transfer = config.weight_transfer_config
    if transfer is None or transfer.backend != "weightsync":
        raise UnsupportedError(
            "this vLLM runs without the service; start it with"
            ' weight_transfer_config={"backend": "weightsync"}'
        )
