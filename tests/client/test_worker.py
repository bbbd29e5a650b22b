from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from weightsync_client import (  # noqa: E402
    connect,
    push_model,
    verify,
)

from tests.client.live import Live, bits, tiny, without  # noqa: E402
from weightsync.core.types import (  # noqa: E402
    Target,
    TargetState,
)

BF16 = tiny(2).state_dict()


def test_verify_names_each_difference(live: Live) -> None:
    """B32, B46: one changed bit is found by name; NaNs equal themselves; what lacks is listed."""
    source = tiny(2)
    with torch.no_grad():
        source.fc.weight[0, 0] = float("nan")
    push_model(live.fleet, source, version="v1")
    report = verify(live.fleet, source)
    assert report.equal
    assert not report.not_compared
    assert list(report.weight_versions.values()) == ["v1"]
    source.ln.weight.detach().view(torch.uint8)[3] ^= 1
    (difference,) = verify(live.fleet, source).differences
    assert difference.name == "ln.weight"
    assert verify(live.fleet, without(source.state_dict(), "ln.weight")).not_compared == (
        "verifier:ln.weight",
    )


def test_live_weights_can_be_read_back(live: Live) -> None:
    """What a worker holds comes out in the form in which it goes in."""
    state: dict[str, bytearray] = {}
    for chunk in live.worker.read(Target.VERIFIER):
        position = 0
        for segment in chunk.segments:
            end = position + segment.byte_length
            state.setdefault(segment.name, bytearray()).extend(chunk.payload[position:end])
            position = end
    assert {k: bytes(v) for k, v in state.items()} == bits(live.verifier)


def test_events_tell_of_an_update(live: Live) -> None:
    """A watcher sees the session from start to commit, and can stop watching."""
    events = live.worker.watch()
    assert next(events).kind.name == "WATCHING"
    push_model(live.fleet, BF16, version="v1")
    assert [next(events).kind.name for _ in range(3)] == ["STARTED", "PREPARED", "COMMITTED"]
    events.close()  # type: ignore[attr-defined]


def test_health_is_asked_of_the_worker(live: Live) -> None:
    """Serving is what the worker's health service says."""
    assert connect(live.server.address).serving()
    assert live.worker.info().targets[0].state is TargetState.READY


def test_many_sessions_leave_nothing_behind(live: Live) -> None:
    """B74: neither threads nor sessions pile up."""
    push_model(live.fleet, BF16, version="v0")
    before = threading.active_count()
    for index in range(20):
        push_model(live.fleet, BF16, version=f"v{index}")
    assert threading.active_count() <= before + 2
    assert live.worker.info().targets[0].num_commits == 21
