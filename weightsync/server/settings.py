"""What can be set about a server: by keywords in a program, by the environment from outside."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from pydantic import field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from weightsync.core.types import Limits
from weightsync.server.logs import LogFormat


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server presents itself.

    Attributes:
        address: `HOST:PORT` (port 0: a free one) or `unix:///PATH`.
        allow_insecure: Allow a TCP address that other hosts can reach without TLS.
        tls_certificate: PEM file with the server's certificate chain; None: no TLS.
        tls_key: PEM file with its private key.
        tls_client_ca: PEM file with those who sign the certificates that clients must have then.
        tokens: File with the tokens that callers must have then, see `weightsync token`.
        reflection: Describe the services to tools like grpcurl; None: only to this host.
        metrics_host: Where `/metrics` listens.
        metrics_port: Its port, 0 for a free one; None: no `/metrics`.
        health_host: Where health answers in plain text, for probes.
        health_port: Its port, 0 for a free one; None: only where the services are.
        shared_memory: Let clients of the same user on this host write into the arena.
        tracing: Make OpenTelemetry spans, by the process's global tracer provider.
    """

    address: str = "127.0.0.1:0"
    allow_insecure: bool = False
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None
    reflection: bool | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    health_host: str = "127.0.0.1"
    health_port: int | None = None
    shared_memory: bool = True
    tracing: bool = False


_DEFAULT = ServerConfig()
_MAY_BE_ZERO = frozenset({"max_spare_bytes"})


class ServerSettings(BaseSettings):
    """The same from the environment: `WEIGHTSYNC_ADDRESS`, `WEIGHTSYNC_LIMITS__MAX_STREAMS`, ...

    Attributes beyond `ServerConfig` and `Limits`:
        log_format: How log lines are written to standard error.
        log_level: Lowest level that is written.
        stop_grace: Seconds that open sessions get to finish when the server stops.
    """

    model_config = SettingsConfigDict(
        env_prefix="WEIGHTSYNC_", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    address: str = _DEFAULT.address
    allow_insecure: bool = _DEFAULT.allow_insecure
    tls_certificate: Path | None = _DEFAULT.tls_certificate
    tls_key: Path | None = _DEFAULT.tls_key
    tls_client_ca: Path | None = _DEFAULT.tls_client_ca
    tokens: Path | None = _DEFAULT.tokens
    reflection: bool | None = _DEFAULT.reflection
    metrics_host: str = _DEFAULT.metrics_host
    metrics_port: int | None = _DEFAULT.metrics_port
    health_host: str = _DEFAULT.health_host
    health_port: int | None = _DEFAULT.health_port
    shared_memory: bool = _DEFAULT.shared_memory
    tracing: bool = _DEFAULT.tracing
    limits: Limits = Limits()
    log_format: LogFormat = LogFormat.CONSOLE
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    stop_grace: float = 10.0

    @field_validator("limits")
    @classmethod
    def _check_limits(cls, limits: Limits) -> Limits:
        for name, value in asdict(limits).items():
            if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                raise ValueError(f"{name} must be positive")
        if limits.max_payload_bytes <= 0:
            raise ValueError("max_message_bytes must be more than the 65536 bytes of a header")
        return limits

    @property
    def config(self) -> ServerConfig:
        """How the server presents itself."""
        return ServerConfig(**{f.name: getattr(self, f.name) for f in fields(ServerConfig)})
