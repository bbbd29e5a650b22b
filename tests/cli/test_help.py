from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.conftest import ENVIRONMENT, run

COMMANDS = (
    "serve",
    "push",
    "catch-up",
    "status",
    "tensors",
    "verify",
    "sharing",
    "soak",
    "demo",
    "demo-vllm",
)
SUBCOMMANDS = ("token new", "token revoke")


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_help_has_examples(command: str) -> None:
    """The help of each command shows how it is called, and offers JSON."""
    done = run(*command.split(), "--help")
    assert done.returncode == 0
    assert f"weightsync {command}" in done.stdout
    assert "For example" in done.stdout
    assert "--json" in done.stdout


def test_help_lists_all_commands() -> None:
    """The help of the whole lists every command and the exit codes."""
    done = run("--help")
    assert done.returncode == 0
    for expected in (*COMMANDS, "token", "Exit codes"):
        assert expected in done.stdout


def test_help_is_quick() -> None:
    """The command line is known without the import of torch, grpc, protobuf or matplotlib."""
    code = (
        "import sys, weightsync.cli.main; "
        "print(*{'torch', 'grpc', 'google.protobuf', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    "arguments", [("push",), ("push", "here"), ("nonsense",), ("status", "--nonsense", "x:1")]
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    """A wrong call exits with 2 and says so on standard error."""
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == "" or arguments == ("push",)
