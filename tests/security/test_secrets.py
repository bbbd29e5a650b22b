"""Tokens and private keys stay where they are: in no log, no error, no metric, no repr."""

from __future__ import annotations

import io
import logging
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner
from weightsync_client import Credentials, Fleet, connect, push_model

import weightsync
from tests.security.authority import Authority, Tokens
from weightsync.cli.main import app
from weightsync.core.errors import (
    InternalError,
    InvalidRequestError,
    PermissionDeniedError,
    UnauthenticatedError,
    WeightSyncError,
)
from weightsync.server.logs import LogFormat, make_logger
from weightsync.server.scopes import AccessScope
from weightsync.server.settings import ServerConfig, ServerSettings
from weightsync.server.tokens import TokenFile
from weightsync.testing.models import tiny_pair


def text_of(error: WeightSyncError) -> str:
    """Return all that an error tells, and what it was raised from."""
    return "\n".join(
        map(repr, (error, str(error), error.subjects, error.metadata, error.__cause__))
    )


@pytest.mark.parametrize("log_format", LogFormat)
def test_no_secret_is_told(
    *,
    log_format: LogFormat,
    authority: Authority,
    tokens: Tokens,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Sessions that work, callers that are refused, files that break, and a fault: no secret shows.

    All logs are looked through at their lowest level, gRPC's own among them.
    """
    caplog.set_level(logging.DEBUG)
    good = tokens.add("trainer", AccessScope)
    reader = tokens.add("reader", [AccessScope.READ])
    wrong = "wsync_a-token-that-nobody-knows"
    stored = tokens.path.read_text()
    files = authority.server()
    client = authority.issue("client", "client")
    keys = [files["tls_key"].read_text(), client[1].read_text()]
    file = tmp_path / "token"
    file.write_text(good)
    told = []
    stream = io.StringIO()

    def credentials(**token: str | Path) -> Credentials:
        made = Credentials(ca=authority.ca, certificate=client[0], key=client[1], **token)  # type: ignore[arg-type]
        told.append(f"{made!r} {made}")
        return made

    def refused(kind: type[WeightSyncError], do: Callable[[], object]) -> None:
        with pytest.raises(kind) as caught:
            do()
        told.append(text_of(caught.value))

    with weightsync.serve(
        *tiny_pair(),
        log=make_logger(log_format, stream, logging.DEBUG),
        tls_client_ca=authority.ca,
        tokens=tokens.path,
        metrics_port=0,
        **files,  # type: ignore[arg-type]
    ) as server:
        address = server.address
        new = tiny_pair(seed=1)
        report = push_model(address, *new, version="v1", credentials=credentials(token_file=file))
        for kind, token in (
            (UnauthenticatedError, wrong),
            (UnauthenticatedError, ""),
            (InvalidRequestError, "two words " + wrong),
        ):
            refused(kind, partial(connect, address, credentials=credentials(token=token)))
        with Fleet([address], credentials=credentials(token=reader)) as fleet:
            refused(PermissionDeniedError, partial(fleet.update, version="v2"))
            told.append(f"{fleet!r} {fleet.workers!r}")
        remove = server.worker.trace.add(_fail)
        with (
            Fleet([address], credentials=credentials(token=good)) as fleet,
            fleet.update(version="v3") as session,
        ):
            session.push(new[0])
            refused(InternalError, partial(fleet.workers[0].prepare, *session.ticket.session_ids))
            session.abort("enough")
        remove()
        # Files that break, with a secret where it does not belong.
        tokens.path.write_text(stored.replace('"name"', f'"{good}"'))
        connect(address, credentials=credentials(token=good)).close()
        files["tls_certificate"].write_text(keys[0])
        connect(address, credentials=credentials(token=good)).close()
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as page:
            told.append(page.read().decode())
        told.append(f"{server!r} {report} {report!r}")
    config = ServerConfig(tokens=tokens.path, tls_key=files["tls_key"])
    settings = ServerSettings(tokens=tokens.path, **files)  # type: ignore[arg-type]
    told += [repr(config), repr(settings), settings.model_dump_json()]
    told.append(repr(TokenFile.parse(stored.encode())))
    told += [stream.getvalue(), caplog.text, *capfd.readouterr()]
    everything = "\n".join(told)
    assert "trainer" in everything  # The names are told.
    assert "files.refused" in everything
    for secret in (good, reader, wrong, *_lines(*keys)):
        assert secret not in everything


def _fail(step: str, _facts: dict[str, object]) -> None:
    if step == "prepare.started":
        raise KeyError("a fault")


def _lines(*keys: str) -> list[str]:
    """Return the lines of keys, without those that all keys have."""
    return [line for key in keys for line in key.splitlines() if "-----" not in line]


def test_files_of_tokens_are_for_their_owner(tmp_path: Path) -> None:
    """What the shell writes has mode 0600, and keeps the mode that somebody gave it."""
    path = tmp_path / "tokens.json"

    def new(name: str) -> None:
        done = CliRunner().invoke(
            app, ["token", "new", "--tokens", str(path), "--name", name, "--scope", "read"]
        )
        assert done.exit_code == 0

    new("a")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    new("b")
    assert path.stat().st_mode & 0o777 == 0o640
    assert [token.name for token in TokenFile.parse(path.read_bytes()).tokens] == ["a", "b"]
    assert [found.name for found in tmp_path.iterdir()] == ["tokens.json"]
