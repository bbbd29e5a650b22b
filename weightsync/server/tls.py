"""TLS: the server's certificate, and the authority of its clients, renewed without a restart."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from typing import final

import grpc
from structlog.typing import FilteringBoundLogger

from weightsync.core.errors import InvalidRequestError
from weightsync.server.settings import ServerConfig
from weightsync.server.watched import Watched


def server_credentials(
    config: ServerConfig, log: FilteringBoundLogger
) -> grpc.ServerCredentials | None:
    """Return credentials that follow the files which a config names; None if it names none.

    Raises:
        InvalidRequestError: a file is missing, can't be read, or does not fit the others.
    """
    paths = [config.tls_certificate, config.tls_key, config.tls_client_ca]
    named = [path for path in paths if path is not None]
    if not named:
        return None
    if config.tls_certificate is None or config.tls_key is None:
        raise InvalidRequestError(
            "TLS needs a certificate and its key: give tls_certificate and tls_key, both",
            subjects=["tls_certificate", "tls_key"],
        )
    return _Identity(Watched(named, _Pem.checked, log)).credentials


@dataclass(frozen=True, slots=True)
class _Pem:
    """Contents of PEM files that fit together.

    Attributes:
        certificate: The server's chain, its own certificate first.
        key: The private key of that certificate.
        client_ca: Who signs the certificates that clients must have; None: they need none.
    """

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    client_ca: bytes | None = field(default=None, repr=False)

    @classmethod
    def checked(cls, certificate: bytes, key: bytes, client_ca: bytes | None = None) -> _Pem:
        """Return contents that TLS can use: gRPC itself would tell only its next clients.

        Raises:
            InvalidRequestError: they are no PEM, or the key is not the certificate's.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Python loads a chain from a path only; this one never touches a disk.
        memory = os.memfd_create("weightsync-tls")
        try:
            os.write(memory, certificate + b"\n" + key)
            # An empty password: a key that is locked must not make the start ask for one.
            context.load_cert_chain(f"/proc/self/fd/{memory}", password="")
            if client_ca is not None:
                context.load_verify_locations(cadata=client_ca.decode("ascii"))
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"the files for TLS can't be used ({error}); the certificate and its key must be"
                " PEM, belong together, and have no password",
                subjects=["tls_certificate", "tls_key", "tls_client_ca"],
            ) from None
        finally:
            os.close(memory)
        return cls(certificate, key, client_ca)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return them in the form of gRPC, which takes each object once."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], root_certificates=self.client_ca
        )


@final
class _Identity:
    """What the server shows in the next handshake."""

    def __init__(self, files: Watched[_Pem]) -> None:
        self._files = files
        self._shown = files.get()
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._shown.configuration(),
            self._next,  # type: ignore[arg-type] # None: as it was
            require_client_authentication=self._shown.client_ca is not None,
        )

    def _next(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what has changed since the last handshake."""
        now = self._files.get()
        if now is self._shown:
            return None
        self._shown = now
        return now.configuration()
