from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.conftest import COMMAND, ENVIRONMENT, started
from weightsync.cli.demo.events import (
    Generated,
    LeftBehind,
    Listening,
    Measured,
    Pushed,
    Trained,
    Verified,
)
from weightsync.cli.demo.history import History
from weightsync.cli.demo.plot import plot
from weightsync.cli.demo.screen import Screen, sparks


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demo(tmp_path: Path) -> None:
    """The demo trains, pushes and generates in real processes, and both models end up equal."""
    done = subprocess.run(
        [*COMMAND, "demo", "--quick", "--json", "--out", str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["verified"]["equal"] is True
    assert result["version"] == f"step-{result['steps']}"
    assert result["loss"]["last"] < result["loss"]["first"]
    acceptance = result["acceptance"]
    assert acceptance["with_updates"] > acceptance["without_updates"]
    assert Path(result["plot"]).read_bytes().startswith(b"\x89PNG")


def test_interrupt_ends_all(tmp_path: Path) -> None:
    """Ctrl-C ends the trainer and the worker as well, and exits with 130."""
    with started("demo", "--out", tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("worker at ")
        task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        children = [int(pid) for pid in task.read_text().split() if _is_spawned(pid)]
        assert len(children) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert not any(_lives(pid) for pid in children)


def _is_spawned(pid: str) -> bool:
    # multiprocessing has a helper of its own, which ends soon after its parent.
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def history() -> History:
    """A short run in which the draft's copy falls behind."""
    history = History()
    history.add(Listening("127.0.0.1:1", "report"))
    for step in range(1, 31):
        time = 1000.0 + step
        history.add(Trained(time, step, 5.0 - step / 10, 0.3))
        history.add(Generated(time, f"step-{step}", True, "To be", " or not", 10, 6))
        if step == 10:
            history.add(LeftBehind(time, "step-10"))
        if step > 10:
            history.add(Generated(time, f"step-{step}", False, "To be", " or n", 10, 1))
        if step % 10 == 0:
            history.add(Pushed(time, f"step-{step}", 4_000_000, 49, 0.04, 0.002, {}))
    history.add(Verified(51, ()))
    history.add(Measured(0.6, 0.1))
    return history


def test_history(history: History) -> None:
    """A run's result is what its events say."""
    result = history.as_json()
    assert result["pushes"] == 3
    assert result["mb_per_s"] == 100.0
    assert result["pause_ms"] == {"median": 2.0, "max": 2.0}
    assert result["acceptance"] == {"with_updates": 0.6, "without_updates": 0.1}
    assert history.acceptance[True].now == 0.6
    assert history.acceptance[False].now == 0.1
    assert history.equal


def test_difference_is_no_success(history: History) -> None:
    """One tensor that differs, or a comparison of nothing, is not equal."""
    history.add(Verified(51, ("verifier:lm_head.weight",)))
    assert not history.equal
    history.add(Verified(0, ()))
    assert not history.equal


def test_screen_shows_what_matters(history: History) -> None:
    """The screen shows version, loss, rate, pause, both acceptance rates and the sample."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=40)
    with Screen(history, console):
        pass
    shown = file.getvalue()
    for expected in ("step-30", "100 MB/s", "2.0 ms", "60%", "10%", "or not", "127.0.0.1:1"):
        assert expected in shown


def test_screen_before_the_first_event() -> None:
    """The screen can be drawn before anything happened."""
    file = io.StringIO()
    with Screen(History(), Console(file=file, force_terminal=True, width=100, height=40)):
        pass
    assert "starting" in file.getvalue()


def test_sparks() -> None:
    """A line of bars goes from the lowest to the highest value, and bears equal ones."""
    assert sparks([3.0, 2.0, 1.0])[0] == "█"
    assert sparks([3.0, 2.0, 1.0])[-1] == "▁"
    assert sparks([1.0]) == "▁"


def test_plot(history: History, tmp_path: Path) -> None:
    """The plot is written to the file that was named."""
    plot(history, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
