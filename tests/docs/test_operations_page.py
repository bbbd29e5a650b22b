from __future__ import annotations

import shlex
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command
from weightsync_client import Fleet, push_model

import weightsync
from tests.docs.pages import blocks, read, run, table
from weightsync.cli.main import app
from weightsync.core.types import Limits
from weightsync.server.server import Server
from weightsync.server.settings import ServerSettings
from weightsync.testing.models import tiny_pair

PAGE = "docs/operations.md"


def told(value: object) -> str:
    """Return a value as the page shows it."""
    return f"`{getattr(value, 'value', value)}`"


def test_the_page_lists_every_setting() -> None:
    """Each variable is there with its default, in the order of the settings."""
    settings = ServerSettings()
    wanted = [
        (f"`WEIGHTSYNC_{name.upper()}`", told(getattr(settings, name)))
        for name in ServerSettings.model_fields
        if name != "limits"
    ]
    wanted += [
        (f"`WEIGHTSYNC_LIMITS__{field.name.upper()}`", told(getattr(Limits(), field.name)))
        for field in fields(Limits)
    ]
    assert [(name, default) for name, default, _ in table(PAGE, "## Settings")] == wanted


def test_the_page_lists_every_metric() -> None:
    """After an update `/metrics` has the families of the page, with its types and labels."""
    with weightsync.serve(*tiny_pair(), metrics_port=0) as server:
        push_model(server.address, *tiny_pair(seed=1), version="v1")
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as answer:
            text = answer.read().decode()
    found = set()
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue  # Each counter and histogram tells when it began, too.
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        total = "_total" if family.type == "counter" else ""
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        found.add((f"`{family.name}{total}`", family.type, shown))
    assert {tuple(row[:3]) for row in table(PAGE, "## Metrics")} == found


def test_the_line_of_python_serves(tmp_path: Path) -> None:
    """The first example starts a server with metrics."""
    block, _ = blocks(PAGE, "python")
    verifier, draft = tiny_pair()
    names: dict[str, object] = {"model": verifier, "draft": draft}
    text = block.text.replace("127.0.0.1:50051", f"unix://{tmp_path}/w").replace("9400", "0")
    run(type(block)("python", text, block.line), PAGE, names)
    server = names["server"]
    assert isinstance(server, Server)
    with server:
        assert server.metrics_address


def test_the_lines_that_trace_run() -> None:
    """The second example makes a worker and a fleet with tracing, which update."""
    _, block = blocks(PAGE, "python")
    verifier, draft = tiny_pair()
    names: dict[str, object] = {"model": verifier, "draft": draft}
    run(block, PAGE, names)
    server, fleet = names["server"], names["fleet"]
    assert isinstance(server, Server)
    assert isinstance(fleet, Fleet)
    with server, fleet:
        assert push_model(fleet, *tiny_pair(seed=1), version="v1").committed


@pytest.mark.parametrize("page", ["README.md", PAGE])
def test_commands_are_spelt_as_they_are(page: str) -> None:
    """Each command line on the page is understood: subcommand, arguments and options."""
    group = get_command(app)
    lines = [line for block in blocks(page, "sh") for line in block.text.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("weightsync")]
    assert commands
    for _, name, *arguments in commands:
        command = group.get_command(None, name)  # type: ignore[attr-defined]
        assert command is not None, name
        command.make_context(name, [a for a in arguments if a != "&"])


def test_every_outcome_is_named() -> None:
    """The states in which sessions end are the outcomes that the page names."""
    assert all(f"`{word}`" in read(PAGE) for word in ("committed", "aborted", "expired", "failed"))
