"""What a client shows to workers, and what it expects of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from weightsync.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Credentials:
    """Certificates for TLS, and a token.

    TLS is spoken where a worker has TCP and `ca` or `certificate` is given. Unix sockets never
    have it. Files are read when a `Worker` is made; that of the token for each call, so that it may
    be renewed meanwhile.

    Attributes:
        ca: PEM file with those who sign workers' certificates; None: those that gRPC brings.
        certificate: PEM file with the client's own certificate chain, for workers that want one.
        key: PEM file with its private key.
        token: A token.
        token_file: A file that holds a token, instead.
        server_name: The name that must be in the worker's certificate, if it is another than the
            host of the address.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    token: str = field(default="", repr=False)
    token_file: Path | str | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        """Check what is given.

        Raises:
            InvalidRequestError: half of a pair, or two tokens.
        """
        if (self.certificate is None) != (self.key is None):
            raise InvalidRequestError(
                "a certificate and its key belong together: give both", subjects=["key"]
            )
        if self.token and self.token_file is not None:
            raise InvalidRequestError(
                "there is a token and a file with a token: give one of them", subjects=["token"]
            )

    @property
    def has_tls(self) -> bool:
        """Tell whether TLS is spoken over TCP."""
        return self.ca is not None or self.certificate is not None

    @property
    def has_token(self) -> bool:
        """Tell whether calls carry a token."""
        return bool(self.token) or self.token_file is not None

    def bearer(self) -> str:
        """Return the token as calls carry it, from what its file holds now.

        Raises:
            InvalidRequestError: the file can't be read, or holds no token.
        """
        token = self.token
        if self.token_file is not None:
            token = (read(self.token_file) or b"").decode(errors="replace").strip()
        # What is no plain word would break gRPC's call, and end up in its error.
        if not (token.isascii() and token.isprintable() and token) or " " in token:
            where = self.token_file or "the text that was given"
            raise InvalidRequestError(f"{where} is no token", subjects=["token"])
        return f"Bearer {token}"


def read(path: Path | str | None) -> bytes | None:
    """Return what a file holds; None without one.

    Raises:
        InvalidRequestError: it can't be read.
    """
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(
            f"can't read {path}: {error.strerror}", subjects=[str(path)]
        ) from error
