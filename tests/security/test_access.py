"""What callers may do: tokens and their scopes, for every rpc of the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

import weightsync
from tests.integration.raw import DRAFT, FULL, VERIFIER, code_of, connect, told
from tests.security.authority import NOW, Tokens
from weightsync.core.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownSessionError,
    WeightSyncError,
)
from weightsync.server.scopes import SCOPES, AccessScope
from weightsync.testing.models import tiny_pair
from weightsync.v1 import engine_control_pb2, types_pb2, weight_sync_pb2

SERVICES = (
    weight_sync_pb2.DESCRIPTOR.services_by_name["WeightSync"],
    engine_control_pb2.DESCRIPTOR.services_by_name["EngineControl"],
)
RPCS = [method for service in SERVICES for method in service.methods]
WRITES = [m for m in RPCS if AccessScope.WRITE_DRAFT in SCOPES[m.name]]

# Written down a second time, on purpose: a change of the table has to be meant.
READ = (
    "GetWorker",
    "ListTensors",
    "GetWeightUpdate",
    "VerifyWeights",
    "ReadWeights",
    "WatchWorker",
)
WRITE = (
    "StartWeightUpdate",
    "ListPlacements",
    "UpdateWeights",
    "PrepareWeightUpdate",
    "FinishWeightUpdate",
    "AbortWeightUpdate",
)


class House:
    """A server that wants tokens, and its callers, each with one token or none."""

    def __init__(self, folder: Path) -> None:
        self.tokens = Tokens(folder / "tokens.json")
        self.secrets = {scope: self.tokens.add(scope.name, [scope]) for scope in AccessScope}
        self.everything = self.tokens.add("everything", AccessScope)
        self.server = weightsync.serve(*tiny_pair(), tokens=self.tokens.path)
        self.channel: Any = connect(self.server.address)

    def call(
        self, method: MethodDescriptor, authorization: str | None, request: bytes = b""
    ) -> None:
        """Call any rpc with raw bytes, and read its first answer; raise what the worker raised."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        shown = () if authorization is None else (("authorization", authorization),)
        with told():
            if method.client_streaming:
                call = self.channel.stream_unary(path)
                call(iter([request] if request else []), timeout=60, metadata=shown)
            elif method.server_streaming:
                answers = self.channel.unary_stream(path)(request, timeout=60, metadata=shown)
                next(answers, None)
                answers.cancel()
            else:
                self.channel.unary_unary(path)(request, timeout=60, metadata=shown)

    def session(self, *targets: int) -> str:
        """Open a session."""
        start = weight_sync_pb2.StartWeightUpdateRequest(
            targets=targets,  # type: ignore[arg-type]
            scope=FULL,
            weight_version="v1",
        )
        call = self.channel.unary_unary("/weightsync.v1.WeightSync/StartWeightUpdate")
        shown = (("authorization", f"Bearer {self.everything}"),)
        answer = call(start.SerializeToString(), timeout=60, metadata=shown)
        opened = weight_sync_pb2.StartWeightUpdateResponse.FromString(answer)
        return opened.session.session_id


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One server for all rpcs."""
    made = House(tmp_path_factory.mktemp("house"))
    yield made
    made.channel.close()
    made.server.stop(0.0)


def allowed(house: House, method: MethodDescriptor, secret: str, request: bytes = b"") -> bool:
    """Tell whether a call gets as far as the worker, whatever that makes of it."""
    try:
        house.call(method, f"Bearer {secret}", request)
    except PermissionDeniedError:
        return False
    except UnauthenticatedError as error:
        raise AssertionError("a token that counts") from error
    except WeightSyncError:
        return True
    return True


def test_every_rpc_has_a_scope() -> None:
    """Somebody has decided on each rpc of the contract: no other is served."""
    assert set(SCOPES) == {method.name for method in RPCS}
    for method in RPCS:
        kind = "read" if method.name in READ else "write" if method.name in WRITE else "control"
        assert {scope.value.partition(":")[0] for scope in SCOPES[method.name]} == {kind}


@pytest.mark.parametrize("method", RPCS, ids=lambda m: m.name)
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic d2VpZ2h0OnN5bmM=", "bearer  x"],
)
def test_without_a_good_token_nothing_is_done(
    house: House, method: MethodDescriptor, authorization: str | None
) -> None:
    """No rpc answers a caller without a token that it knows; garbage is not even parsed."""
    with pytest.raises(UnauthenticatedError) as caught:
        house.call(method, authorization, b"\x0a\xff")
    assert code_of(caught.value) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", RPCS, ids=lambda m: m.name)
@pytest.mark.parametrize("scope", AccessScope, ids=lambda s: s.value)
def test_a_scope_allows_its_rpcs_only(
    house: House, method: MethodDescriptor, scope: AccessScope
) -> None:
    """A token with one scope does what that scope is for; for the rest the missing one is told."""
    if method.name == "Sleep":  # What it does would be felt by the others; a bad level does not.
        request = engine_control_pb2.SleepRequest(level=99).SerializeToString()
    else:
        request = b""
    assert allowed(house, method, house.secrets[scope], request) == (scope in SCOPES[method.name])
    if scope not in SCOPES[method.name]:
        with pytest.raises(PermissionDeniedError) as caught:
            house.call(method, f"Bearer {house.secrets[scope]}", request)
        assert code_of(caught.value) is grpc.StatusCode.PERMISSION_DENIED
        wanted = {scope.value for scope in SCOPES[method.name]}
        assert set(caught.value.metadata["scope"].split(",")) == wanted
        assert scope.name in str(caught.value)


@pytest.mark.parametrize("method", WRITES, ids=lambda m: m.name)
@pytest.mark.parametrize("targets", [(VERIFIER,), (DRAFT,), (VERIFIER, DRAFT)])
def test_the_targets_of_a_session_decide(
    house: House, method: MethodDescriptor, targets: tuple[int, ...]
) -> None:
    """Who may write one model only neither opens, fills, ends nor drops a session on another."""
    message = GetMessageClass(method.input_type)()
    session = ""
    if method.name == "StartWeightUpdate":
        message = weight_sync_pb2.StartWeightUpdateRequest(
            targets=targets,  # type: ignore[arg-type]
            scope=FULL,
            weight_version="v2",
            expected_base_versions=[
                weight_sync_pb2.BaseVersion(
                    target=targets[0],  # type: ignore[arg-type]
                    weight_version="never",
                )
            ],
        )
    else:
        session = house.session(*targets)
        message.session_id = session  # type: ignore[attr-defined]
        if isinstance(message, weight_sync_pb2.UpdateWeightsRequest):
            message.checksum_type = types_pb2.CHECKSUM_TYPE_NONE
    request = message.SerializeToString()
    try:
        for scope, target in (
            (AccessScope.WRITE_DRAFT, DRAFT),
            (AccessScope.WRITE_VERIFIER, VERIFIER),
        ):
            assert allowed(house, method, house.secrets[scope], request) == (targets == (target,))
        assert allowed(house, method, house.everything, request)
    finally:
        abort = weight_sync_pb2.AbortWeightUpdateRequest(session_id=session).SerializeToString()
        with suppress(UnknownSessionError):
            house.call(rpc("AbortWeightUpdate"), f"Bearer {house.everything}", abort)


def rpc(name: str) -> MethodDescriptor:
    """Return an rpc by its name."""
    (found,) = [method for method in RPCS if method.name == name]
    return found


def test_two_tokens_are_none(house: House) -> None:
    """A call with two tokens is refused, whichever of them is good."""
    good = ("authorization", f"Bearer {house.everything}")
    call = house.channel.unary_unary("/weightsync.v1.WeightSync/GetWorker")
    with pytest.raises(UnauthenticatedError), told():
        call(b"", timeout=60, metadata=(good, ("authorization", "Bearer wrong")))


def test_an_expired_token_is_none(house: House) -> None:
    """A token ends when it was said to end; the error says whose it was."""
    good = house.tokens.add("fresh", [AccessScope.READ], NOW + timedelta(days=1))
    old = house.tokens.add("old", [AccessScope.READ], NOW - timedelta(seconds=1))
    house.call(rpc("GetWorker"), f"Bearer {good}")
    with pytest.raises(UnauthenticatedError, match="old has expired"):
        house.call(rpc("GetWorker"), f"Bearer {old}")


def test_tokens_come_and_go_while_it_runs(house: House) -> None:
    """A new token counts from the next call on, and a revoked one no longer."""
    secret = house.tokens.add("guest", [AccessScope.READ])
    house.call(rpc("GetWorker"), f"Bearer {secret}")
    house.tokens.revoke("guest")
    with pytest.raises(UnauthenticatedError):
        house.call(rpc("GetWorker"), f"Bearer {secret}")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tokens": [{"name": "x"}]}', None])
def test_a_broken_file_of_tokens_changes_nothing(house: House, content: str | None) -> None:
    """A file that can't be used leaves the tokens before in force."""
    before = house.tokens.path.read_text()
    try:
        if content is None:
            house.tokens.path.unlink()
        else:
            house.tokens.path.write_text(content)
        house.call(rpc("GetWorker"), f"Bearer {house.everything}")
        with pytest.raises(UnauthenticatedError):
            house.call(rpc("GetWorker"), "Bearer wrong")
    finally:
        house.tokens.path.write_text(before)


def test_health_needs_no_token(house: House) -> None:
    """Probes and load balancers ask without a token, and learn nothing but the state."""
    stub: Any = health_pb2_grpc.HealthStub(house.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_name_can_not_be_taken(house: House) -> None:
    """Who holds a session is told by the token's name first, whatever a caller says."""
    start = weight_sync_pb2.StartWeightUpdateRequest(
        targets=[DRAFT], scope=FULL, weight_version="v1", holder="WRITE_VERIFIER"
    )
    call = house.channel.unary_unary("/weightsync.v1.WeightSync/StartWeightUpdate")
    shown = (("authorization", f"Bearer {house.secrets[AccessScope.WRITE_DRAFT]}"),)
    answer = call(start.SerializeToString(), timeout=60, metadata=shown)
    session = weight_sync_pb2.StartWeightUpdateResponse.FromString(answer).session
    abort = weight_sync_pb2.AbortWeightUpdateRequest(session_id=session.session_id)
    house.call(
        rpc("AbortWeightUpdate"),
        f"Bearer {house.secrets[AccessScope.WRITE_DRAFT]}",
        abort.SerializeToString(),
    )
    assert session.holder == "WRITE_DRAFT (WRITE_VERIFIER)"


def test_the_file_keeps_no_token(house: House) -> None:
    """Whoever reads the file of tokens can't call: it holds hashes, and no two alike."""
    text = house.tokens.path.read_text()
    hashes = {token["sha256"] for token in json.loads(text)["tokens"]}
    assert len(hashes) >= len(AccessScope) + 1
    for secret in (*house.secrets.values(), house.everything):
        assert secret not in text
        assert secret not in hashes


def test_without_a_file_everybody_may(tmp_path: Path) -> None:
    """Without tokens a server takes all calls, and a token that is sent does no harm."""
    with weightsync.serve(*tiny_pair()) as server:
        channel: Any = connect(server.address)
        call = channel.unary_unary("/weightsync.v1.WeightSync/GetWorker")
        assert call(b"", timeout=60)
        assert call(b"", timeout=60, metadata=(("authorization", "Bearer x"),))
        channel.close()


def test_a_worker_that_can_not_read_its_tokens_does_not_start(tmp_path: Path) -> None:
    """Without its file of tokens a server does not fall back to none."""
    with pytest.raises(InvalidRequestError, match="can't read"):
        weightsync.serve(*tiny_pair(), tokens=tmp_path / "nowhere")
    (tmp_path / "tokens.json").write_text('{"tokens": [{"name": "a", "token": "wsync_secret"}]}')
    with pytest.raises(InvalidRequestError, match="tokens") as caught:
        weightsync.serve(*tiny_pair(), tokens=tmp_path / "tokens.json")
    assert "wsync_secret" not in str(caught.value)
