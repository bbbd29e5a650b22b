"""Where a worker listens, and what it tells to whom there."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from weightsync_client import Credentials, connect
from weightsync_client.channel import open_channel

from tests.integration import raw
from tests.security.authority import Authority, Tokens
from tests.security.conftest import Start
from weightsync.core.errors import InvalidRequestError
from weightsync.server.scopes import AccessScope
from weightsync.v1 import weight_sync_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_probes_have_a_port_of_their_own(
    start: Start, authority: Authority, tokens: Tokens
) -> None:
    """A probe without certificate and token hears whether the worker serves, and that it stops."""
    server = start(
        **authority.server(), tls_client_ca=authority.ca, tokens=tokens.path, health_port=0
    )
    assert server.health_address is not None
    with raw.connect(server.health_address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == SERVING
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status == SERVING
        server.worker.drain()
        assert next(watch).status == NOT_SERVING
        server.stop(0.0)
        assert list(watch) == []


def test_on_that_port_is_nothing_else(start: Start) -> None:
    """Who reaches the port for probes finds neither the services nor their description."""
    server = start(health_port=0, reflection=True)
    assert server.health_address is not None
    with raw.connect(server.health_address) as channel:
        for service in ("weightsync.v1.WeightSync/GetWorker", "weightsync.v1.EngineControl/Sleep"):
            call: Any = channel.unary_unary(f"/{service}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not describes(channel)


def test_that_port_is_not_there_by_itself(start: Start) -> None:
    """Without being asked for, nothing listens but the services."""
    assert start().health_address is None


def test_a_taken_port_for_probes_stops_the_start(start: Start) -> None:
    """A port for probes that another has is told, and nothing of the server stays."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InvalidRequestError, match=str(port)):
            start(health_port=port, metrics_port=0)


def describes(channel: grpc.Channel) -> bool:
    """Tell whether the services are described there."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([]), timeout=60)
    code = call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED)
    return bool(code is grpc.StatusCode.OK)


@pytest.mark.parametrize(
    ("address", "asked", "described"),
    [
        ("127.0.0.1:0", None, True),
        ("0.0.0.0:0", None, False),
        ("0.0.0.0:0", True, True),
        ("127.0.0.1:0", False, False),
    ],
)
def test_other_hosts_get_no_description_over_tls(
    start: Start, authority: Authority, address: str, asked: bool | None, described: bool
) -> None:
    """With TLS, too, services describe themselves only to this host, unless they are asked to."""
    server = start(address=address, reflection=asked, **authority.server())
    port = server.address.rpartition(":")[2]
    with open_channel(f"127.0.0.1:{port}", Credentials(ca=authority.ca)) as channel:
        assert describes(channel) is described


@pytest.mark.parametrize("allow_insecure", [False, True])
def test_tokens_never_travel_in_plain_text(
    start: Start, authority: Authority, tokens: Tokens, allow_insecure: bool
) -> None:
    """A server that wants tokens listens to other hosts with TLS only, whatever the flag says."""
    tokens.add("trainer", AccessScope)
    with pytest.raises(InvalidRequestError, match="read the callers' tokens"):
        start(address="0.0.0.0:0", tokens=tokens.path, allow_insecure=allow_insecure)
    start(address="0.0.0.0:0", tokens=tokens.path, **authority.server())


def test_clients_show_no_token_in_plain_text() -> None:
    """A client does not send its token over a network without TLS; nothing is even connected."""
    with pytest.raises(InvalidRequestError, match="could read the token"):
        open_channel("10.0.0.1:50051", Credentials(token="wsync_secret"))  # noqa: S106 - made up


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_on_this_host_tokens_need_no_tls(
    start: Start, tokens: Tokens, tmp_path: Path, kind: str
) -> None:
    """On loopback and unix sockets a token is taken without certificates, from a file each time."""
    address = f"unix://{tmp_path}/w.sock" if kind == "unix" else "127.0.0.1:0"
    server = start(address=address, tokens=tokens.path)
    file = tmp_path / "token"
    file.write_text(tokens.add("first", [AccessScope.READ]) + "\n")
    with connect(server.address, credentials=Credentials(token_file=file)) as worker:
        assert [info.name for info in worker.tensors()]
        tokens.revoke("first")
        file.write_text(tokens.add("second", [AccessScope.READ]))
        assert [info.name for info in worker.tensors()]


def test_idle_connections_hold_nobody_up(start: Start, authority: Authority) -> None:
    """Hundreds of connections that never begin their handshake keep no one else from calling."""
    server = start(**authority.server())
    host, _, port = server.address.rpartition(":")
    with ExitStack() as idle:
        for _ in range(300):
            idle.enter_context(socket.create_connection((host, int(port)), timeout=60))
        with connect(server.address, credentials=Credentials(ca=authority.ca)) as worker:
            assert worker.serving()


def test_a_handshake_does_not_last_for_ever(
    start: Start, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that says nothing, or half of a greeting, is cut off by the worker."""
    monkeypatch.setattr("weightsync.server.server.HANDSHAKE_SECONDS", 0.2)
    host, _, port = start(**authority.server()).address.rpartition(":")
    for said in (b"", b"\x16\x03\x01\x02\x00\x01"):
        with socket.create_connection((host, int(port)), timeout=60) as idle:
            idle.sendall(said)
            assert idle.recv(1) == b""


def test_a_large_question_on_the_port_for_probes(start: Start) -> None:
    """Nobody makes the port for probes hold a large message."""
    server = start(health_port=0)
    assert server.health_address is not None
    with raw.connect(server.health_address) as channel:
        call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError) as caught:
            call(weight_sync_pb2.UpdateWeightsRequest(payload=bytes(1 << 20)).SerializeToString())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
