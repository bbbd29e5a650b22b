from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest
from typer.main import get_command

from tests.docs.pages import Block, blocks, run, table
from tests.security.authority import Authority
from weightsync.cli.main import app
from weightsync.server.scopes import SCOPES, AccessScope
from weightsync.server.server import Server
from weightsync.server.tokens import TokenFile, new_secret
from weightsync.testing.models import tiny_pair

PAGE = "docs/security.md"
ATTACKERS = {
    "another process on the host",
    "another pod on the network",
    "man in the middle",
    "malicious trainer with a valid token",
    "malicious checkpoint",
    "slow client",
    "who steals a disk, or reads logs",
}


def test_each_attacker_is_stopped_by_tests() -> None:
    """Every attacker of the threat model has a row, and every row names tests."""
    rows = table(PAGE, "## Who might attack, and what stops them")
    assert {row[0] for row in rows} == ATTACKERS
    for attacker, *_, tests in rows:
        assert re.findall(r"`(tests/[\w/]+\.py::\w+)`", tests), attacker


def test_the_page_lists_every_scope() -> None:
    """The table of scopes is the one of the code: each rpc stands where it belongs."""
    told: dict[str, frozenset[AccessScope]] = {}
    for scopes, allows in table(PAGE, "## Tokens"):
        named = frozenset(map(AccessScope, re.findall(r"`([\w:]+)`", scopes)))
        told |= dict.fromkeys(re.findall(r"`(\w+)`", allows), named)
    assert told == dict(SCOPES)


def test_the_lines_of_python_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of one block takes the push of the next, with certificates and a token."""
    monkeypatch.chdir(tmp_path)
    authority = Authority(tmp_path)
    authority.issue("server", "127.0.0.1")
    authority.issue("trainer", "trainer.example")
    secret = new_secret()
    Path("trainer.token").write_text(secret)
    known = TokenFile().with_token("trainer", secret, AccessScope)
    Path("tokens.json").write_text(known.model_dump_json())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    worker, trainer = (
        Block("python", block.text.replace("50051", port), block.line)
        for block in blocks(PAGE, "python")
    )
    verifier, draft = tiny_pair()
    names: dict[str, object] = {"model": verifier, "draft": draft}
    run(worker, PAGE, names)
    server = names["server"]
    assert isinstance(server, Server)
    with server:
        names["model"], names["draft"] = tiny_pair(seed=1)
        run(trainer, PAGE, names)
        assert {t.weight_version for t in server.worker.info().targets} == {"step-100"}


def test_commands_are_spelt_as_they_are() -> None:
    """Each command about tokens on the page is understood: subcommand and options."""
    group = get_command(app).get_command(None, "token")  # type: ignore[attr-defined]
    lines = [line for block in blocks(PAGE, "sh") for line in block.text.splitlines()]
    assert lines
    for line in lines:
        program, command, name, *arguments = shlex.split(line)
        assert (program, command) == ("weightsync", "token")
        group.get_command(None, name).make_context(name, arguments)
