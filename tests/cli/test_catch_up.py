from __future__ import annotations

import json

from weightsync_client import push_model, verify

import weightsync
from tests.cli.conftest import run
from weightsync.cli import exits
from weightsync.testing.models import tiny_pair

NEW = tiny_pair(seed=1)


def test_a_late_worker_gets_what_a_peer_holds() -> None:
    """The command copies once, tells the versions, and leaves a worker alone that has them."""
    with weightsync.serve(*tiny_pair()) as peer, weightsync.serve(*tiny_pair(seed=2)) as late:
        push_model(peer.address, *NEW, version="v1")
        done = run("catch-up", late.address, "--from", peer.address)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["outcome\tcommitted", "verifier\tv1", "draft\tv1"]
        assert verify(late.address, NEW[0]).equal
        again = run("catch-up", late.address, "--from", peer.address, "--json")
        assert json.loads(again.stdout) == {"outcome": "held", "verifier": "v1", "draft": "v1"}


def test_a_peer_without_a_version_is_refused() -> None:
    """A peer that holds no version itself is an error in one line, and nothing is copied."""
    with weightsync.serve(*tiny_pair()) as peer, weightsync.serve(*tiny_pair(seed=2)) as late:
        done = run("catch-up", late.address, "--from", peer.address)
    assert done.returncode == exits.UNFIT
    assert "holds no version of the verifier" in done.stderr
