from __future__ import annotations

import json
from pathlib import Path

import pytest
import trustme

from tests.cli.conftest import next_line, run, started


def files(folder: Path) -> tuple[list[object], list[object]]:
    """Write certificates; return the options of a worker and those of the other commands."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name in ("127.0.0.1", "trainer"):
        made = authority.issue_cert(name)
        made.private_key_and_cert_chain_pem.write_to_path(str(folder / f"{name}.pem"))
    own, client, ca = (folder / f"{name}.pem" for name in ("127.0.0.1", "trainer", "ca"))
    worker = ["--tls-certificate", own, "--tls-key", own, "--tls-client-ca", ca]
    return worker, ["--tls-ca", ca, "--tls-cert", client, "--tls-key", client]


def new_token(tokens: Path, name: str, *scopes: str) -> Path:
    """Make a token by the command, and keep it in a file."""
    wanted = [word for scope in scopes for word in ("--scope", scope)]
    done = run("token", "new", "--tokens", tokens, "--name", name, *wanted)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    file = tokens.with_name(name)
    file.write_text(line)
    return file


def test_a_worker_with_certificates_and_tokens(folders: Path, tmp_path: Path) -> None:
    """From the shell: tokens are made, a worker is pushed to over TLS, and others are refused."""
    tokens = tmp_path / "tokens.json"
    trainer = new_token(tokens, "trainer", "read", "write:verifier")
    reader = new_token(tokens, "reader", "read")
    worker, client = files(tmp_path)
    serve = ("serve", "--verifier", folders / "old/verifier", "--tokens", tokens, *worker)
    with started(*serve, "--threads", 1, "--log-level", "debug", "--json") as process:
        address = json.loads(next_line(process))["address"]
        push = ("push", folders / "new/verifier", "--to", address, "--version", "v2", *client)
        done = run(*push, "--token-file", trainer)
        assert done.returncode == 0, done.stderr
        status = run("status", address, *client, "--token-file", reader, "--json")
        assert json.loads(status.stdout)["targets"]["verifier"]["version"] == "v2"

        denied = run(*push, "--token-file", reader, "--json")
        assert denied.returncode == 10
        assert json.loads(denied.stderr.splitlines()[-1])["error"] == "PermissionDeniedError"
        nobody = run("status", address, *client)
        assert nobody.returncode == 10
        assert "--token-file" in nobody.stderr

        done = run("token", "revoke", "--tokens", tokens, "--name", "reader")
        assert done.returncode == 0, done.stderr
        assert run("status", address, *client, "--token-file", reader).returncode == 10
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert "trainer/trainer" in log
    for file in (trainer, reader):
        assert file.read_text() not in log + denied.stderr + nobody.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("new", "--name", "two words", "--scope", "read"), "name"),
        (("new", "--name", "taken", "--scope", "read"), "two tokens have one name"),
        (("revoke", "--name", "nobody"), "no token of the name nobody"),
    ],
)
def test_tokens_that_can_not_be(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    """A name that is none, is taken, or is not there, is told in one line and nothing changes."""
    tokens = tmp_path / "tokens.json"
    new_token(tokens, "taken", "control")
    before = tokens.read_text()
    command, *rest = arguments
    done = run("token", command, "--tokens", tokens, *rest)
    assert done.returncode == 3
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert tokens.read_text() == before


def test_an_unknown_scope_is_wrong_usage(tmp_path: Path) -> None:
    """A scope that does not exist is refused before a token is made."""
    done = run("token", "new", "--tokens", tmp_path / "t", "--name", "a", "--scope", "root")
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())
