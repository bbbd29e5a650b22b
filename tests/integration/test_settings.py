from __future__ import annotations

import pytest
from pydantic import ValidationError

from weightsync.core.types import Limits
from weightsync.server.logs import LogFormat
from weightsync.server.settings import ServerConfig, ServerSettings


def test_without_an_environment_the_defaults_hold() -> None:
    """Settings, keywords and limits have the same defaults."""
    settings = ServerSettings()
    assert settings.config == ServerConfig()
    assert settings.limits == Limits()


def test_the_environment_sets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field has a variable; limits are reached with two underscores."""
    for name, value in {
        "ADDRESS": "unix:///run/weightsync/0.sock",
        "REFLECTION": "false",
        "METRICS_PORT": "9100",
        "LOG_FORMAT": "json",
        "LIMITS__MAX_STREAMS": "3",
        "LIMITS__DEFAULT_LEASE": "7.5",
    }.items():
        monkeypatch.setenv(f"WEIGHTSYNC_{name}", value)
    settings = ServerSettings()
    assert settings.config == ServerConfig(
        address="unix:///run/weightsync/0.sock", reflection=False, metrics_port=9100
    )
    assert settings.limits == Limits(max_streams=3, default_lease=7.5)
    assert settings.log_format is LogFormat.JSON


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("LIMITS__MAX_STREMS", "3", "max_strems"),
        ("LIMITS__MAX_STREAMS", "0", "max_streams must be positive"),
        ("LIMITS__MAX_MESSAGE_BYTES", "65536", "max_message_bytes"),
        ("METRICS_PORT", "http", "metrics_port"),
        ("LOG_FORMAT", "xml", "log_format"),
    ],
)
def test_bad_settings_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    """A misspelt or senseless variable stops the start and is named."""
    monkeypatch.setenv(f"WEIGHTSYNC_{name}", value)
    with pytest.raises(ValidationError, match=told):
        ServerSettings()
