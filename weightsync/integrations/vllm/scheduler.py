"""The other end of a commit: the scheduler drops what was computed with old weights."""

from __future__ import annotations

import functools
import logging
from typing import Any

from weightsync.engines.vllm.caches import outlive_requests
from weightsync.integrations.vllm.epoch import Epoch

_log = logging.getLogger(__name__)


def watch_weights(scheduler_class: Any, backend: str) -> None:  # noqa: ANN401 - of vLLM
    """Let all schedulers of a class, and of those derived from it, look at the weights' number.

    Only in engines with our backend, and only where the cache is to be reset.
    """
    made = scheduler_class.__init__

    @functools.wraps(made)
    def watching(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        made(self, *args, **kwargs)
        config = self.vllm_config
        transfer = config.weight_transfer_config
        if transfer is None or transfer.backend != backend:
            return
        if not outlive_requests(config):
            return
        from weightsync.integrations.vllm.settings import (  # noqa: PLC0415 - not for all
            CacheAfterCommit,
            WorkerSettings,
        )

        settings = WorkerSettings.read(config.additional_config)
        if settings.cache_after_commit is CacheAfterCommit.RESET:
            self.schedule = _ResettingSchedule(self, Epoch(config.instance_id))

    scheduler_class.__init__ = watching


class _ResettingSchedule:
    """`schedule` of one scheduler, with a look at the weights before it."""

    def __init__(self, scheduler: Any, epoch: Epoch) -> None:  # noqa: ANN401
        self._scheduler = scheduler
        self._schedule = scheduler.schedule
        self._epoch = epoch
        self._seen = epoch.read()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Plan the next step."""
        now = self._epoch.read()
        if now != self._seen:
            self._seen = now
            self._reset()
        return self._schedule(*args, **kwargs)

    def _reset(self) -> None:
        try:
            # Requests in flight are kept, and compute what they have cached anew.
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError as error:
            _log.warning("prefixes of old weights stay in use: %s", error)
        encoded = self._scheduler.encoder_cache_manager
        if hasattr(encoded, "cached"):  # that of models with a decoder apart shares nothing
            stale = [*encoded.freed, *encoded.cached]
            self._scheduler.reset_encoder_cache()
            # Workers drop these with the next step's plan, not before: one that was planned
            # already still looks for them.
            encoded.freed.extend(stale)
