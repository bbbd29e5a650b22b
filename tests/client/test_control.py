from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weightsync_client import push_model  # noqa: E402

from tests.client.live import Live, bits, tiny  # noqa: E402
from weightsync.core.errors import (  # noqa: E402
    EngineUnavailableError,
    InvalidRequestError,
    UnsupportedError,
)
from weightsync.core.types import TargetState  # noqa: E402


def test_a_worker_is_put_to_sleep_and_woken(everywhere: Live) -> None:
    """Each call answers with the states; asleep the worker is not healthy and takes nothing."""
    live = everywhere
    push_model(live.fleet, tiny(2), version="v1")
    control = live.worker.control
    assert {status.state for status in control.sleep(1)} == {TargetState.ASLEEP}
    assert not live.worker.serving()
    with pytest.raises(EngineUnavailableError, match="sleeps"):
        push_model(live.fleet, tiny(3), version="v2")
    with pytest.raises(EngineUnavailableError, match="sleeps"):
        list(live.worker.digests())
    awake = control.wake_up()
    assert {status.state for status in awake} == {TargetState.READY}
    assert awake[0].weight_version == "v1"
    assert live.worker.serving()
    assert bits(live.verifier) == bits(tiny(2))


def test_tags_are_the_engines_words(live: Live) -> None:
    """Weights wake by their tag; a tag that the engine lacks is refused, and it sleeps on."""
    control = live.worker.control
    control.sleep(2)
    with pytest.raises(UnsupportedError, match="'kv_cache'"):
        control.wake_up(["kv_cache"])
    with pytest.raises(InvalidRequestError, match="tags"):
        control.wake_up(["weights"] * 100_000)
    assert live.worker.info().targets[0].state is TargetState.ASLEEP
    assert {s.state for s in control.wake_up(["weights"])} == {TargetState.QUARANTINED}


def test_an_update_goes_through_while_generation_is_held(live: Live) -> None:
    """Pause and resume may be repeated; what the engine can't do is told."""
    control = live.worker.control
    control.pause()
    control.pause()
    push_model(live.fleet, tiny(2), version="v1")
    control.resume()
    control.resume()
    assert bits(live.verifier) == bits(tiny(2))
    assert "ResetPrefixCache" not in live.worker.info().controls
    with pytest.raises(UnsupportedError, match="no prefix cache"):
        control.reset_prefix_cache()
