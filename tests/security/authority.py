"""Certificates and tokens as the tests need them, made by the tests themselves."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme
from weightsync_client import Credentials

from weightsync.server.scopes import AccessScope
from weightsync.server.tokens import TokenFile, new_secret

NOW = datetime.now(timezone.utc)
LONG_AGO = NOW - timedelta(days=30)
YESTERDAY = NOW - timedelta(days=1)


class Authority:
    """Signs certificates, and keeps each with its key in files of a folder.

    Attributes:
        ca: Its own certificate.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._made = trustme.CA()
        self.ca = folder / f"{name}.pem"
        self._made.cert_pem.write_to_path(str(self.ca))

    def issue(self, file: str, *names: str, expired: bool = False) -> tuple[Path, Path]:
        """Write a certificate for some names, and its key, in place of earlier ones."""
        made = (
            self._made.issue_cert(*names, not_before=LONG_AGO, not_after=YESTERDAY)
            if expired
            else self._made.issue_cert(*names)
        )
        certificate, key = self._folder / f"{file}.crt", self._folder / f"{file}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        key.write_bytes(made.private_key_pem.bytes())
        return certificate, key

    def server(self, *names: str, expired: bool = False) -> dict[str, Path]:
        """Return what `serve` takes, for a certificate on 127.0.0.1 if no name is given."""
        certificate, key = self.issue("server", *(names or ("127.0.0.1",)), expired=expired)
        return {"tls_certificate": certificate, "tls_key": key}

    def client(self, name: str, *, expired: bool = False, **more: str) -> Credentials:
        """Return credentials of a client who has a certificate."""
        certificate, key = self.issue(name, name, expired=expired)
        return Credentials(ca=self.ca, certificate=certificate, key=key, **more)


class Tokens:
    """A file of tokens, and the tokens themselves, which only their holders have.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = TokenFile()
        self._write()

    def add(self, name: str, scopes: Iterable[AccessScope], expires: datetime | None = None) -> str:
        """Make a token."""
        secret = new_secret()
        self._known = self._known.with_token(name, secret, scopes, expires)
        self._write()
        return secret

    def revoke(self, name: str) -> None:
        """Take a token back."""
        self._known = self._known.without(name)
        self._write()

    def _write(self) -> None:
        self.path.write_text(self._known.model_dump_json())


def shown_certificate(address: str) -> bytes:
    """Return the certificate that a server shows to a new connection."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        context.wrap_socket(connection) as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return shown
