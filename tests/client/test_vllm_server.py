from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from weightsync_client import (  # noqa: E402
    ConnectionLostError,
    DeadlineError,
    Fleet,
    VllmServer,
    push_model,
)

from tests.client.live import bits, tiny  # noqa: E402
from tests.client.vllm_routes import RefusedError, Routes, routed  # noqa: E402
from weightsync.core.errors import (  # noqa: E402
    EngineUnavailableError,
    InvalidRequestError,
    UnauthenticatedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.core.types import Target  # noqa: E402
from weightsync.server.serve import serve  # noqa: E402

NEW = tiny(9)
NOW = 0.0


class Site:
    """Two workers and the routes in front of them."""

    def __init__(self) -> None:
        self.models = [tiny(0), tiny(1)]
        self.servers = [serve(model, tiny(2)) for model in self.models]
        self.routes = Routes(self.servers)

    def holds(self) -> list[dict[Target, str]]:
        """Return the versions that the workers hold."""
        infos = [server.worker.info() for server in self.servers]
        return [{t.target: t.weight_version for t in info.targets} for info in infos]


@pytest.fixture
def site() -> Iterator[Site]:
    """Serve two workers."""
    made = Site()
    yield made
    for server in made.servers:
        server.stop(grace=0)


@pytest.fixture
def url(site: Site) -> Iterator[str]:
    """Serve the routes."""
    with routed(site.routes) as found:
        yield found


def test_a_server_commits_what_its_fleet_has_sent(site: Site, url: str) -> None:
    """All ranks are found by one URL; a session ends with the server's calls in their order."""
    with Fleet.from_vllm(url) as fleet:
        assert [w.address for w in fleet.workers] == [s.address for s in site.servers]
        assert push_model(fleet, NEW, version="v1").committed
        assert all(bits(model) == bits(NEW) for model in site.models)
        assert site.routes.calls == [("start", None), ("update", 2), ("finish", "v1")]

        site.routes.calls.clear()
        assert push_model(fleet, None, tiny(3), version="v2").committed
        assert site.routes.calls == [("start draft", None), ("update", 2), ("finish", None)]
    assert site.holds() == [{Target.VERIFIER: "v1", Target.DRAFT: "v2"}] * 2


def test_what_a_server_refuses_is_told(site: Site, url: str) -> None:
    """An error of the commit comes back with its text, nothing has changed, the next one works."""
    update = site.routes.routes["update_weights"]

    def refuse(_body: Any) -> None:
        raise RefusedError(500, "no memory")

    site.routes.routes["update_weights"] = refuse
    with Fleet.from_vllm(url) as fleet:
        with pytest.raises(EngineUnavailableError, match=r"update_weights: no memory.*500"):
            push_model(fleet, NEW, version="v1")
        assert site.holds() == [{Target.VERIFIER: "", Target.DRAFT: ""}] * 2
        site.routes.routes["update_weights"] = update
        assert push_model(fleet, NEW, version="v2").committed


def test_a_commit_whose_answer_is_lost_is_found_out(site: Site, url: str) -> None:
    """The workers are asked; all of them hold the new version, so that nothing failed."""

    def cut(body: Any) -> None:
        site.routes.update_weights(body)
        raise RefusedError(0)

    site.routes.routes["update_weights"] = cut
    with Fleet.from_vllm(url) as fleet:
        assert push_model(fleet, NEW, version="v1").committed
    assert [held[Target.VERIFIER] for held in site.holds()] == ["v1", "v1"]


def refusing(status: int) -> Any:
    """Return a route that always answers with a status."""

    def refuse(_body: Any) -> None:
        raise RefusedError(status, "no")

    return refuse


@pytest.mark.parametrize(
    ("changes", "error", "remedy"),
    [
        ({"server_info": refusing(404)}, UnsupportedError, "VLLM_SERVER_DEV_MODE=1"),
        ({"server_info": refusing(401)}, UnauthenticatedError, "api_key"),
        ({"server_info": refusing(0)}, EngineUnavailableError, "is vLLM up"),
        (
            {"server_info": lambda _: {"vllm_config": {"weight_transfer_config": None}}},
            UnsupportedError,
            "--weight-transfer-config",
        ),
        ({"collective_rpc": lambda _: {"results": [None]}}, InvalidRequestError, "None"),
        ({"collective_rpc": refusing(500)}, EngineUnavailableError, "no"),
    ],
)
def test_a_server_that_does_not_fit_is_told_with_the_remedy(
    site: Site, url: str, changes: dict[str, Any], error: type[WeightSyncError], remedy: str
) -> None:
    """Routes, key, backend: what lacks is named."""
    site.routes.routes |= changes
    with pytest.raises(error, match=remedy):
        Fleet.from_vllm(url, timeout=NOW)


def test_several_engines_are_found_by_their_directory_only(site: Site, url: str) -> None:
    """A server that asks one engine of several does not make half a fleet."""
    del site.routes.places[1]
    with pytest.raises(UnsupportedError, match="directory"):
        Fleet.from_vllm(url)


def test_a_key_is_sent(site: Site, url: str) -> None:
    """A server that wants a key gets it with each call."""
    with pytest.raises(InvalidRequestError, match="http://HOST:PORT"):
        VllmServer("10.0.0.1:8000")
    assert "secret" not in repr(VllmServer(url, api_key="secret"))
    with Fleet.from_vllm(url, api_key="secret") as fleet:
        assert push_model(fleet, NEW, version="v1").committed
    assert site.routes.keys == {"Bearer secret"}


def test_a_rank_at_all_addresses_is_reached_by_the_name_of_the_server(site: Site, url: str) -> None:
    """A wildcard is no address; the host is the one that the URL names."""
    first = site.routes.places[0]
    port = first.address.rpartition(":")[2]
    site.routes.places[0] = replace(first, address=f"0.0.0.0:{port}")
    with Fleet.from_vllm(url) as fleet:
        assert fleet.workers[0].address == f"127.0.0.1:{port}"


def test_a_rank_that_only_its_own_host_can_reach_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another host, a loopback address would lead to somebody else."""
    monkeypatch.setattr(VllmServer, "_on_this_host", lambda _server: False)
    with pytest.raises(InvalidRequestError, match="WEIGHTSYNC_VLLM_ADDRESS"):
        Fleet.from_vllm(url)


def test_a_server_that_is_loading_is_waited_for(site: Site, url: str) -> None:
    """Who can't be reached yet is asked again."""
    tell = site.routes.routes["server_info"]

    def cut(_body: Any) -> None:
        site.routes.routes["server_info"] = tell
        raise RefusedError(0)

    site.routes.routes["server_info"] = cut
    with Fleet.from_vllm(url) as fleet:
        assert len(fleet.workers) == 2


def test_a_server_that_says_nothing_is_given_up() -> None:
    """Each call has a deadline, and a closed port is no server."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineError):
            VllmServer(f"http://127.0.0.1:{port}", timeout=0.05).weight_version()
    with pytest.raises(ConnectionLostError):
        VllmServer(f"http://127.0.0.1:{port}").weight_version()
