"""Who may connect: certificates of servers and clients, real ones."""

from __future__ import annotations

import dataclasses
import io
import json
import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as pem
from weightsync_client import (
    ConnectionLostError,
    Credentials,
    Fleet,
    SendOptions,
    connect,
    push_model,
    verify,
)

from tests.integration.raw import all_bits, bits
from tests.security.authority import Authority, Tokens, shown_certificate
from tests.security.conftest import Start
from weightsync.core.errors import InvalidRequestError, TargetBusyError
from weightsync.core.views import EventKind
from weightsync.server.scopes import AccessScope
from weightsync.testing.faults.relay import Relay
from weightsync.testing.models import Tiny, tiny_pair

Models = tuple[Tiny, Tiny]


def refused(address: str, credentials: Credentials | None) -> str:
    """Try to connect, which must fail; return why."""
    with pytest.raises(ConnectionLostError) as caught:
        connect(address, credentials=credentials, timeout=60)
    return str(caught.value)


def test_a_push_over_tls(start: Start, authority: Authority) -> None:
    """A trainer who knows the authority pushes and verifies as over plain text."""
    server = start(**authority.server())
    credentials = Credentials(ca=authority.ca)
    new = tiny_pair(seed=1)
    report = push_model(server.address, *new, version="v1", credentials=credentials)
    assert report.committed
    assert verify(server.address, new[0], credentials=credentials).equal


def test_many_connections_over_tls(start: Start, authority: Authority) -> None:
    """Each lane of a worker is a connection with the same credentials."""
    server = start(**authority.server(), tls_client_ca=authority.ca)
    with Fleet([server.address], credentials=authority.client("trainer")) as fleet:
        with fleet.update(version="v1", options=SendOptions(streams=3)) as session:
            session.push(tiny_pair(seed=1)[0])
        assert session.report.committed


def test_a_name_of_its_own(start: Start, authority: Authority) -> None:
    """A certificate for a name that is not the address is taken if the client asks for it."""
    server = start(**authority.server("worker-0.example"))
    refused(server.address, Credentials(ca=authority.ca))
    named = Credentials(ca=authority.ca, server_name="worker-0.example")
    with connect(server.address, credentials=named) as worker:
        assert worker.serving()


@pytest.mark.parametrize("certificate", ["of another authority", "expired", "of another host"])
def test_a_server_that_is_not_the_right_one(
    start: Start, authority: Authority, tmp_path: Path, certificate: str
) -> None:
    """A client talks to nobody whose certificate is not signed, valid, and for that host."""
    signer = Authority(tmp_path, "other") if certificate == "of another authority" else authority
    names = ("10.0.0.1", "worker.example") if certificate == "of another host" else ()
    server = start(**signer.server(*names, expired=certificate == "expired"))
    told = refused(server.address, Credentials(ca=authority.ca))
    wanted = "Hostname" if certificate == "of another host" else "CERTIFICATE_VERIFY_FAILED"
    assert wanted in told


def test_clients_need_a_certificate(start: Start, authority: Authority, tmp_path: Path) -> None:
    """With an authority for clients, those without a valid certificate of its own are cut off."""
    server = start(**authority.server(), tls_client_ca=authority.ca)
    other = Authority(tmp_path, "other")
    stranger = dataclasses.replace(other.client("stranger"), ca=authority.ca)
    for credentials in (
        Credentials(ca=authority.ca),
        stranger,
        authority.client("late", expired=True),
    ):
        refused(server.address, credentials)
    with connect(server.address, credentials=authority.client("trainer")) as worker:
        assert worker.serving()


def test_the_certificate_names_the_holder(
    start: Start, authority: Authority, log: io.StringIO
) -> None:
    """Who finds a target busy, and who reads the log, learns whose certificate holds it."""
    server = start(**authority.server(), tls_client_ca=authority.ca)
    mine, other = authority.client("trainer-0.example"), authority.client("trainer-1.example")
    with (
        Fleet([server.address], credentials=mine) as first,
        Fleet([server.address], credentials=other) as second,
        first.update(version="v1", holder="says who") as session,
    ):
        with pytest.raises(TargetBusyError) as caught:
            second.update(version="v2", holder="trainer-0.example")
        session.abort("enough")
    assert caught.value.metadata["holder"] == "trainer-0.example (says who)"
    (line,) = [line for line in log.getvalue().splitlines() if "session.started" in line]
    assert json.loads(line)["holder"] == "trainer-0.example (says who)"


def test_plain_text_against_tls_and_back(start: Start, authority: Authority) -> None:
    """A client that speaks the wrong one of the two is refused at once, both ways."""
    secure, plain = start(**authority.server()), start()
    refused(secure.address, None)
    refused(plain.address, Credentials(ca=authority.ca))
    with connect(plain.address) as worker:
        assert worker.serving()


def test_a_new_certificate_while_a_stream_is_open(start: Start, authority: Authority) -> None:
    """New connections see the renewed certificate, without a restart; an open stream goes on."""
    server = start(**authority.server())
    credentials = Credentials(ca=authority.ca)
    before = shown_certificate(server.address)
    with connect(server.address, credentials=credentials) as worker:
        events = worker.watch()
        assert next(events).kind is EventKind.WATCHING
        authority.server()
        after = shown_certificate(server.address)
        assert after != before
        push_model(server.address, *tiny_pair(seed=1), version="v1", credentials=credentials)
        assert next(events).kind is EventKind.STARTED
        assert worker.info().targets[0].weight_version == "v1"


def test_another_authority_while_it_runs(
    start: Start, authority: Authority, tmp_path: Path
) -> None:
    """An authority for clients that is replaced lets its clients in and those before out."""
    server = start(**authority.server(), tls_client_ca=authority.ca)
    new = Authority(tmp_path, "new")
    old_client = authority.client("old")
    new_client = dataclasses.replace(new.client("new"), ca=tmp_path / "root.pem")
    (tmp_path / "root.pem").write_bytes(authority.ca.read_bytes())
    refused(server.address, new_client)
    authority.ca.write_bytes(new.ca.read_bytes())
    refused(server.address, dataclasses.replace(old_client, ca=tmp_path / "root.pem"))
    with connect(server.address, credentials=new_client) as worker:
        assert worker.serving()


@pytest.mark.parametrize("broken", ["no PEM", "another key", "gone", "half"])
def test_a_broken_certificate_changes_nothing(
    start: Start, authority: Authority, log: io.StringIO, broken: str
) -> None:
    """Files that can't be used leave the certificate before in force; the log says so, once."""
    files = authority.server()
    server = start(**files)
    before = shown_certificate(server.address)
    if broken == "no PEM":
        files["tls_certificate"].write_text("nothing")
    elif broken == "another key":
        files["tls_key"].write_bytes(authority.issue("else", "else")[1].read_bytes())
    elif broken == "gone":
        files["tls_key"].unlink()
    else:
        whole = files["tls_certificate"].read_bytes()
        files["tls_certificate"].write_bytes(whole[: len(whole) // 3])
    assert [shown_certificate(server.address) for _ in range(3)] == [before] * 3
    told = [line for line in log.getvalue().splitlines() if "files.refused" in line]
    assert len(told) == 1
    authority.server()
    assert shown_certificate(server.address) != before


@pytest.mark.parametrize("given", [("tls_certificate",), ("tls_key",), ("tls_client_ca",)])
def test_half_of_tls_is_none(start: Start, authority: Authority, given: tuple[str]) -> None:
    """A certificate without its key, or an authority alone, stops the start."""
    files = {**authority.server(), "tls_client_ca": authority.ca}
    with pytest.raises(InvalidRequestError, match="both"):
        start(**{name: files[name] for name in given})


def test_files_that_do_not_fit_stop_the_start(start: Start, authority: Authority) -> None:
    """A key of another certificate, or a file that is not there, is told at the start."""
    files = authority.server()
    with pytest.raises(InvalidRequestError, match="belong together"):
        start(**files | {"tls_key": authority.issue("else", "else")[1]})
    with pytest.raises(InvalidRequestError, match="can't read"):
        start(**files | {"tls_key": authority.ca.parent / "nowhere"})


def test_a_locked_key_stops_the_start(start: Start, authority: Authority) -> None:
    """A key with a password is refused; nobody is asked for one."""
    files = authority.server()
    key = pem.load_pem_private_key(files["tls_key"].read_bytes(), None)
    locked = key.private_bytes(
        pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"word")
    )
    files["tls_key"].write_bytes(locked)
    with pytest.raises(InvalidRequestError, match="no password"):
        start(**files)


def test_unix_sockets_have_no_tls(start: Start, authority: Authority, tmp_path: Path) -> None:
    """Certificates for a unix socket are a mistake, and are told."""
    with pytest.raises(InvalidRequestError, match="never leaves this host"):
        start(address=f"unix://{tmp_path}/w.sock", **authority.server())


def test_credentials_go_to_unix_sockets_as_well(start: Start, authority: Authority) -> None:
    """One set of credentials serves a fleet over TCP and unix sockets: there is no TLS on these."""
    server = start(address=f"unix://{authority.ca.parent}/w.sock")
    with connect(server.address, credentials=Credentials(ca=authority.ca)) as worker:
        assert worker.serving()


def test_other_hosts_are_let_in_by_tls_only(start: Start, authority: Authority) -> None:
    """With TLS an address that other hosts can reach needs no flag; without, it does."""
    with pytest.raises(InvalidRequestError, match="tls_certificate"):
        start(address="0.0.0.0:0")
    server = start(address="0.0.0.0:0", **authority.server())
    port = server.address.rpartition(":")[2]
    credentials = Credentials(ca=authority.ca)
    with connect(f"127.0.0.1:{port}", credentials=credentials) as worker:
        assert worker.serving()


def test_old_versions_of_tls_are_refused(start: Start, authority: Authority) -> None:
    """A connection of TLS 1.1 is not made."""
    server = start(**authority.server())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.ca)
    with pytest.warns(DeprecationWarning, match=r"TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    host, _, port = server.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(connection, server_hostname=host)


class Ear(Relay):
    """Forwards connections and keeps what went up to the worker."""

    def __init__(self, address: str, folder: Path) -> None:
        super().__init__(address, folder)
        self.heard = b""

    def _forward(self, data: bytes, sink: socket.socket, way: str) -> None:
        self.heard += data if way == "up" else b""
        super()._forward(data, sink, way)


def test_who_listens_in_learns_nothing(
    start: Start, authority: Authority, tokens: Tokens, tmp_path: Path
) -> None:
    """On the way of a push there is no token, no name and no weight to be read."""
    secret = tokens.add("trainer", AccessScope)
    credentials = Credentials(ca=authority.ca, token=secret)
    new = tiny_pair(seed=1)
    found = []
    for options in (authority.server(), {}):
        server = start(tokens=tokens.path, shared_memory=False, **options)
        with Ear(server.address, tmp_path) as ear:
            given = credentials if options else Credentials(token=secret)
            push_model(ear.address, *new, version="v1", credentials=given)
        weight = bits(new[0].fc.weight)
        found.append([part in ear.heard for part in (secret.encode(), b"fc.weight", weight)])
    # Over plain text the last two are there to be found.
    assert found[0] == [False] * 3
    assert found[1][1:] == [True] * 2


def test_who_changes_bytes_changes_no_weight(
    start: Start, authority: Authority, models: Models, tmp_path: Path
) -> None:
    """Bytes that are changed on their way end the connection; the client sends them again."""
    server = start(**authority.server())
    new = tiny_pair(seed=1)
    credentials = Credentials(ca=authority.ca)
    with Relay(server.address, tmp_path) as relay, connect(relay.address, credentials=credentials):
        relay.at(4_000, Relay.corrupt)
        report = push_model(relay.address, *new, version="v1", credentials=credentials)
        assert relay.reached.is_set()
    assert report.committed
    assert [all_bits(model) for model in models] == [all_bits(model) for model in new]
