"""What can be set about the service in a vLLM worker."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from weightsync.core.errors import InvalidRequestError
from weightsync.server.address import split_host_port
from weightsync.server.settings import ServerConfig, ServerSettings

_RANK = "{rank}"
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - to look for, not to listen at


class CacheAfterCommit(enum.Enum):
    """What becomes of vLLM's prefix cache when the weights have changed."""

    RESET = "reset"
    KEEP = "keep"


class WorkerSettings(ServerSettings):
    """A server's settings and one more, from `additional_config["weightsync"]` or the environment.

    In `address`, `{rank}` stands for the rank of the worker: `unix:///run/vllm/rank{rank}.sock`,
    or `0.0.0.0:5005{rank}` for port 50050 and up.

    Attributes beyond `ServerSettings`:
        directory: Where each rank writes down its address; see `RankFile`. None: nowhere.
        advertise_host: By what name or address others reach this host, where they can't by its own:
            behind a published port, say. None: by the address that it listens at.
        cache_after_commit: What becomes of the prefix cache; `keep` is for those who reset it
            themselves.
        share: Whether a draft holds what equals the verifier's, where vLLM has left it apart.
    """

    model_config = SettingsConfigDict(
        env_prefix="WEIGHTSYNC_VLLM_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    directory: Path | None = None
    advertise_host: str | None = None
    cache_after_commit: CacheAfterCommit = CacheAfterCommit.RESET
    share: bool = True

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

    def advertised(self, address: str, own_ip: Callable[[], str]) -> str:
        """Return how others reach an address at which a rank listens.

        Args:
            address: With the port that was got.
            own_ip: Returns this host's, for a rank that listens at all addresses of it.
        """
        if address.startswith("unix:"):
            return address
        host, port = split_host_port(address)
        host = self.advertise_host or (own_ip() if host in _WILDCARDS else host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
