from __future__ import annotations

import inspect
import signal
import threading
from pathlib import Path

import pytest
from weightsync_client import Checkpoint, Fleet, connect

from tests.cli.conftest import START_SECONDS, next_line, result, run, serving, started
from weightsync.cli.serve import serve
from weightsync.core.errors import WeightSyncError
from weightsync.core.types import Target
from weightsync.server.settings import ServerSettings


def test_sigterm_drains(folders: Path, tmp_path: Path) -> None:
    """On SIGTERM health flips first, an open session may finish, and the exit code is 0."""
    address = f"unix://{tmp_path}/worker.sock"
    arguments = ("--verifier", folders / "old/verifier", "--address", address)
    with serving(*arguments) as (process, printed):
        assert printed == address
        with Fleet([address]) as fleet, connect(address) as worker:
            with fleet.update(version="v2") as session:
                assert worker.serving()
                process.send_signal(signal.SIGTERM)
                flipped = threading.Event()
                while worker.serving():
                    assert not flipped.wait(0.01)
                with pytest.raises(WeightSyncError):
                    fleet.update(version="v3")
                session.push(Checkpoint(folders / "new/verifier"))
            assert session.report.committed
        assert process.wait(START_SECONDS) == 0
        assert not Path(tmp_path / "worker.sock").exists()


def test_open_session_does_not_hold_it(folders: Path) -> None:
    """A session that nobody finishes holds a worker that stops only for the grace it was given."""
    with serving("--verifier", folders / "old/verifier", "--stop-grace", 0.1) as (process, address):
        fleet = Fleet([address])
        fleet.update(version="v2")
        process.send_signal(signal.SIGINT)
        assert process.wait(START_SECONDS) == 0
        fleet.close()


def test_draft_alone(folders: Path) -> None:
    """A draft that has all its tensors is served without a verifier; JSON tells the addresses."""
    with started(
        "serve", "--draft", folders / "old/verifier", "--metrics-port", 0, "--json"
    ) as process:
        printed = next_line(process)
        assert '"metrics_address": "127.0.0.1:' in printed
        address = printed.split('"address": "')[1].split('"')[0]
        with connect(address) as worker:
            assert [held.target for held in worker.info().targets] == [Target.DRAFT]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "nothing to serve"),
        (("--verifier", "/nonexistent"), "no config.json"),
        (("--verifier", "/nonexistent", "--limit", "max_dreams=1"), "max_dreams"),
        (("--verifier", "/nonexistent", "--limit", "max_streams=many"), "max_streams"),
        (("--verifier", "/nonexistent", "--log-format", "poem"), "log_format"),
    ],
)
def test_bad_settings(arguments: tuple[str, ...], told: str) -> None:
    """What can't be served is one line on standard error that names it."""
    done = run("serve", *arguments)
    assert done.returncode == 3
    assert done.stdout == ""
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_setting_has_an_option() -> None:
    """Whatever the environment can set, an option of `serve` can set, too."""
    options = set(inspect.signature(serve).parameters)
    assert set(ServerSettings.model_fields) - {"limits"} <= options
    assert "limit" in options


def test_draft_without_its_own_copies_needs_sharing(folders: Path) -> None:
    """Without sharing, a draft that ships no embedding is refused by the names of what it lacks."""
    done = run(
        "serve",
        "--verifier",
        folders / "old/verifier",
        "--draft",
        folders / "old/draft",
        "--no-share",
    )
    assert done.returncode == 5
    assert "model.embed_tokens.weight" in done.stderr


def test_sharing_of_folders(folders: Path) -> None:
    """The loader's report says what a pair of folders would hold together."""
    report = result("sharing", folders / "old/verifier", folders / "old/draft")
    assert {pair["verdict"] for pair in report["pairs"]} == {"declared"}
    assert report["shared_bytes"] == 2 * 256 * 32 * 4
