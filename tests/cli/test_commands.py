from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from weightsync_client import Fleet, connect

from tests.cli.conftest import COMMAND, ENVIRONMENT, next_line, result, run, serving, started


@pytest.fixture(scope="module")
def worker(folders: Path) -> Iterator[str]:
    """The address of a worker that holds the old pair, embedding and head shared."""
    arguments = ("--verifier", folders / "old/verifier", "--draft", folders / "old/draft")
    with serving(*arguments) as (_, address):
        yield address


def test_push_and_verify(worker: str, folders: Path) -> None:
    """A push of both models makes them live together; verify tells, by its exit code as well."""
    new, old = folders / "new", folders / "old"
    pushed = result(
        "push", new / "verifier", "--draft", new / "draft", "--to", worker, "--version", "new"
    )
    assert pushed["workers"][0]["outcome"] == "committed"
    assert pushed["workers"][0]["versions"] == {"verifier": "new", "draft": "new"}
    assert pushed["sent_bytes"] > 0
    for target in ("verifier", "draft"):
        done = run("verify", new / target, "--target", target, "--to", worker, "--json")
        report = json.loads(done.stdout)
        assert report["differences"] == []
        # The draft's folder has neither embedding nor head: they are the verifier's.
        assert done.returncode == (target == "draft"), done.stdout
        assert len(report["not_compared"]) == 2 * (target == "draft")
    done = run("verify", old / "verifier", "--to", worker)
    assert done.returncode == 1
    assert "NO" in done.stdout


def test_piped_output_is_plain(worker: str, folders: Path) -> None:
    """What is piped has neither control codes nor progress, and standard error stays empty."""
    for arguments in (
        ("push", folders / "new/verifier", "--to", worker, "--version", "plain"),
        ("status", worker),
        ("tensors", worker),
        ("sharing", "--to", worker),
    ):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert "\t" in done.stdout
        assert done.stderr == ""


def test_status(worker: str, folders: Path) -> None:
    """Status tells the version of each target."""
    result("push", folders / "new/verifier", "--to", worker, "--version", "told")
    status = result("status", worker)
    assert status["serving"] is True
    assert status["targets"]["verifier"]["version"] == "told"
    assert status["targets"]["draft"]["state"] == "ready"


def test_watch(worker: str, folders: Path) -> None:
    """Watching a worker prints a line of JSON per event, and ends with Ctrl-C."""
    with started("status", worker, "--watch", "--json") as process:
        assert json.loads(next_line(process))["worker"] == worker
        assert json.loads(next_line(process))["event"] == "watching"
        result("push", folders / "new/verifier", "--to", worker, "--version", "seen")
        events = [json.loads(next_line(process)) for _ in range(3)]
        assert [event["event"] for event in events] == ["started", "prepared", "committed"]
        assert events[-1]["version"] == "seen"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_tensors(worker: str) -> None:
    """Tensors are listed by pattern, with the mark of what is one storage."""
    done = run("tensors", worker, "--name", "lm_head.*", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(t["target"], t["shape"]) for t in found] == [
        ("verifier", [256, 32]),
        ("draft", [256, 32]),
    ]
    assert found[0]["share_group"] == found[1]["share_group"] != ""
    assert run("tensors", worker, "--target", "draft", "--name", "nothing*").returncode == 0


def test_terminal_gets_a_table(worker: str) -> None:
    """On a terminal a person sees aligned columns instead of tabs."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb") as terminal:
        subprocess.run(
            [*COMMAND, "tensors", worker, "--target", "draft", "--name", "lm_head*"],
            env={**ENVIRONMENT, "COLUMNS": "140", "TERM": "xterm"},
            stdout=terminal,
            check=True,
        )
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "lm_head.weight" in shown
    assert "\t" not in shown


def test_sharing_of_a_worker(worker: str) -> None:
    """A worker tells which names are one storage."""
    done = run("sharing", "--to", worker, "--json")
    groups = [set(json.loads(line)["tensors"]) for line in done.stdout.splitlines()]
    assert {"verifier:lm_head.weight", "draft:lm_head.weight"} in groups
    assert {
        "verifier:model.embed_tokens.weight",
        "draft:model.embed_tokens.weight",
    } in groups


def failing(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command that must print nothing but one line on standard error."""
    done = run(*arguments)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done


def test_errors_are_one_line(worker: str, folders: Path, tmp_path: Path) -> None:
    """Each kind of error is one line and an exit code of its own, and what is live stays."""
    held = result("status", worker)["targets"]["verifier"]["version"]
    good = folders / "new/verifier"
    broken = tmp_path / "broken"
    shutil.copytree(good, broken)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    to = ("--to", worker, "--version", "bad")
    assert failing("push", broken, *to).returncode == 3
    assert failing("push", tmp_path, *to).returncode == 3
    assert failing("push", good, *to, "--target", "critic").returncode == 3
    assert failing("push", good, *to, "--shared", "maybe").returncode == 3
    assert failing("push", good, *to, "--expect", "other").returncode == 6
    assert failing("push", good, *to, "--rename", "model=decoder").returncode == 4
    assert failing("push", good, *to, "--target", "draft").returncode == 5
    assert failing("status", "nowhere").returncode == 3
    assert failing("status", f"unix://{tmp_path}/none.sock").returncode == 7
    assert result("status", worker)["targets"]["verifier"]["version"] == held


def test_second_writer(worker: str, folders: Path) -> None:
    """A push beside an open session says who holds the target."""
    with Fleet([worker]) as fleet:
        session = fleet.update(version="first", holder="somebody else")
        done = failing("push", folders / "new/verifier", "--to", worker, "--version", "second")
        assert done.returncode == 6
        assert "somebody else" in done.stderr
        session.abort()


def test_errors_as_json(worker: str, tmp_path: Path) -> None:
    """With `--json` the error is JSON as well, on standard error."""
    done = failing("push", tmp_path, "--to", worker, "--version", "v", "--json")
    assert json.loads(done.stderr)["error"] == "InvalidRequestError"


def test_debug_shows_tracebacks(tmp_path: Path) -> None:
    """With `--debug` errors come with their traceback."""
    done = run("--debug", "push", tmp_path, "--to", "127.0.0.1:1", "--version", "v")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_faults_are_told(tmp_path: Path) -> None:
    """A folder that can't be written is one line, too, without a traceback."""
    (tmp_path / "file").write_text("")
    done = failing("demo", "--out", tmp_path / "file" / "inside")
    assert done.returncode == 3
    assert "inside" in done.stderr


def test_fleet(worker: str, folders: Path) -> None:
    """One push reaches several workers."""
    with serving("--verifier", folders / "old/verifier") as (_, second):
        pushed = result(
            "push", folders / "new/verifier", "--to", f"{worker},{second}", "--version", "both"
        )
        assert [w["outcome"] for w in pushed["workers"]] == ["committed", "committed"]
        with connect(second) as connection:
            assert connection.info().targets[0].weight_version == "both"
