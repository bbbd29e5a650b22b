from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.integrations.vllm.settings import WorkerSettings
from weightsync.server.settings import ServerConfig, ServerSettings

FILES = ("tls_certificate", "tls_key", "tls_client_ca", "tokens")


def test_the_environment_names_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates, tokens and the port for probes can be set from outside."""
    for name in FILES:
        monkeypatch.setenv(f"WEIGHTSYNC_{name.upper()}", f"/run/secrets/{name}")
    monkeypatch.setenv("WEIGHTSYNC_HEALTH_HOST", "0.0.0.0")  # noqa: S104 - for probes
    monkeypatch.setenv("WEIGHTSYNC_HEALTH_PORT", "8081")
    assert ServerSettings().config == ServerConfig(
        **{name: Path("/run/secrets") / name for name in FILES},  # type: ignore[arg-type]
        health_host="0.0.0.0",  # noqa: S104
        health_port=8081,
    )


def test_a_clients_variables_are_none_of_a_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment says for commands that ask workers does not change a worker."""
    for name in ("TLS_CA", "TLS_CLIENT_CERTIFICATE", "TLS_CLIENT_KEY", "TOKEN_FILE"):
        monkeypatch.setenv(f"WEIGHTSYNC_{name}", "/nowhere")
    assert ServerSettings().config == ServerConfig()


def test_a_worker_of_vllm_has_the_same_settings() -> None:
    """Each rank of a vLLM takes certificates and tokens as any worker does."""
    given = {name: f"/run/secrets/{name}" for name in FILES}
    config = WorkerSettings.read({"weightsync": given}).config_of(1)
    assert {name: str(getattr(config, name)) for name in FILES} == given
