"""What can be set about the service in a vLLM worker."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from weightsync.core.errors import InvalidRequestError
from weightsync.server.settings import ServerConfig, ServerSettings

_RANK = "{rank}"


class CacheAfterCommit(enum.Enum):
    """What becomes of vLLM's prefix cache when the weights have changed."""

    RESET = "reset"
    KEEP = "keep"


class WorkerSettings(ServerSettings):
    """A server's settings and one more, from `additional_config["weightsync"]` or the environment.

    In `address`, `{rank}` stands for the rank of the worker: `unix:///run/vllm/rank{rank}.sock`.
    With several ranks a fixed TCP port can't be had; leave the port 0 and read it from `directory`.

    Attributes beyond `ServerSettings`:
        directory: Where each rank writes down its address; see `RankFile`. None: nowhere.
        cache_after_commit: What becomes of the prefix cache; `keep` is for those who reset it
            themselves.
    """

    model_config = SettingsConfigDict(
        env_prefix="WEIGHTSYNC_VLLM_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    directory: Path | None = None
    cache_after_commit: CacheAfterCommit = CacheAfterCommit.RESET

    @classmethod
    def read(cls, additional_config: object) -> WorkerSettings:
        """Read vLLM's `additional_config`, which is stronger than the environment.

        Raises:
            InvalidRequestError: a key or a value that can't be.
        """
        given = additional_config if isinstance(additional_config, Mapping) else {}
        try:
            return cls(**given.get("weightsync", {}))
        except ValidationError as error:
            raise InvalidRequestError(
                f"bad settings of weightsync in vLLM: {error}", subjects=["additional_config"]
            ) from error

    def config_of(self, rank: int) -> ServerConfig:
        """Return how the server of one rank presents itself."""
        return replace(self.config, address=self.address.replace(_RANK, str(rank)))
