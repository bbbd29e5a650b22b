"""Who calls, and whether they may."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import MethodDescriptor

from weightsync.core.errors import PermissionDeniedError, UnauthenticatedError
from weightsync.core.types import Target
from weightsync.server.scopes import SCOPE_OF_TARGET, SCOPES, AccessScope
from weightsync.server.tokens import TokenFile
from weightsync.server.watched import Watched


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        name: Of the token and of the client's certificate; empty if there is neither.
        scopes: What they may do.
    """

    name: str
    scopes: frozenset[AccessScope]

    def require_any(self, scopes: Collection[AccessScope]) -> None:
        """Refuse a caller who has none of some scopes.

        Raises:
            PermissionDeniedError: they are named.
        """
        if self.scopes.isdisjoint(scopes):
            wanted = sorted(scope.value for scope in scopes)
            raise PermissionDeniedError(
                f"{self.name or 'the caller'} may not do that: it takes the scope"
                f" {' or '.join(wanted)}; use a token that has it",
                scope=",".join(wanted),
            )

    def require_targets(self, targets: Iterable[Target]) -> None:
        """Refuse a caller who may not write all of some targets.

        Raises:
            PermissionDeniedError: the first missing scope is named.
        """
        for target in sorted(targets, key=lambda t: t.value):
            self.require_any([SCOPE_OF_TARGET[target]])

    def as_holder(self, said: str) -> str:
        """Return who holds a session: who it is for sure, then who they say they are."""
        if not self.name:
            return said
        return f"{self.name} ({said})" if said else self.name


class Access:
    """Knows callers by their tokens and certificates."""

    def __init__(self, tokens: Watched[TokenFile] | None = None) -> None:
        """Take the tokens; None: everybody who can connect may do everything."""
        self._tokens = tokens

    def caller(self, call: grpc.ServicerContext) -> Caller:
        """Return who makes a call.

        Raises:
            UnauthenticatedError: no token, or none that counts.
        """
        certificate = _certificate_name(call)
        if self._tokens is None:
            return Caller(certificate, frozenset(AccessScope))
        token = self._tokens.get().find(_bearer(call))
        if token is None:
            raise UnauthenticatedError(
                "the token that was sent is none of this worker's; ask those who run it for one"
            )
        if token.expired:
            raise UnauthenticatedError(
                f"the token {token.name} has expired; ask those who run this worker for a new one"
            )
        name = f"{token.name}/{certificate}" if certificate else token.name
        return Caller(name, frozenset(token.scopes))


def scopes_of(method: MethodDescriptor) -> frozenset[AccessScope]:
    """Return of which scopes a method needs one; a KeyError for a method that nobody decided on."""
    return SCOPES[method.name]


def _bearer(call: grpc.ServicerContext) -> str:
    shown = [value for key, value in call.invocation_metadata() if key == "authorization"]
    scheme, _, secret = str(shown[0] if len(shown) == 1 else "").partition(" ")
    if scheme.lower() != "bearer" or not secret:
        raise UnauthenticatedError(
            "this worker takes calls with a token only: send it once, as metadata"
            " 'authorization: Bearer TOKEN' (Credentials(token_file=...), or --token-file)"
        )
    return secret.strip()


def _certificate_name(call: grpc.ServicerContext) -> str:
    """Return the first name in a client's certificate; empty if it showed none."""
    names = call.peer_identities() or ()
    return next((name.decode(errors="replace") for name in names), "")
