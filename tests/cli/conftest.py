"""The command line in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import weightsync_client

import weightsync
from weightsync.cli.demo.models import make_pair, save_pair
from weightsync.cli.demo.plan import Plan

START_SECONDS = 90.0
_HERE = [str(Path(p.__file__ or "").parents[1]) for p in (weightsync, weightsync_client)]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("WEIGHTSYNC_")},
    "PYTHONPATH": os.pathsep.join(_HERE),
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "100",
}
COMMAND = [sys.executable, "-m", "weightsync.cli"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command with its output piped."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )


def result(*arguments: object) -> Any:
    """Run a command with `--json` that must succeed, and return what it printed last."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a command beside the test; it is killed at the end if it has not ended by itself."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background of a shell, they inherit that Ctrl-C is ignored.
        preexec_fn=_heed_interrupts,  # noqa: PLW1509 - only a system call in the child
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def next_line(process: subprocess.Popen[str]) -> str:
    """Wait for the next line that a process prints."""
    assert process.stdout is not None
    # Lines may be buffered already, so that there is nothing to wait for at the pipe itself.
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    line = process.stdout.readline()
    watchdog.cancel()
    if not line:
        process.kill()
        pytest.fail(f"nothing was printed: {process.communicate()[1]}")
    return line.rstrip("\n")


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `weightsync serve` and give its address."""
    with started("serve", "--threads", 1, *arguments) as process:
        yield process, next_line(process)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two versions of a pair: `old` and `new`, each with `verifier` and `draft`."""
    root = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("old", "new")):
        save_pair(*make_pair(Plan(hidden=32, verifier_layers=1, seed=seed)), root / name)
    return root
