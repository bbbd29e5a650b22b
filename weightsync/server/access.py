"""Who calls, and whether they may."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import MethodDescriptor

from weightsync.core.errors import PermissionDeniedError, UnauthenticatedError
from weightsync.core.types import Target
from weightsync.server.tokens import AccessScope, TokenFile
from weightsync.server.watched import Watched

_READ = frozenset({AccessScope.READ})
_WRITE = frozenset({AccessScope.WRITE_VERIFIER, AccessScope.WRITE_DRAFT})
_CONTROL = frozenset({AccessScope.CONTROL})

SCOPES: Mapping[str, frozenset[AccessScope]] = {
    "GetWorker": _READ,
    "ListTensors": _READ,
    "GetWeightUpdate": _READ,
    "VerifyWeights": _READ,
    "ReadWeights": _READ,
    "WatchWorker": _READ,
    "StartWeightUpdate": _WRITE,
    "UpdateWeights": _WRITE,
    "PrepareWeightUpdate": _WRITE,
    "FinishWeightUpdate": _WRITE,
    "AbortWeightUpdate": _WRITE,
    "PauseGeneration": _CONTROL,
    "ResumeGeneration": _CONTROL,
    "Sleep": _CONTROL,
    "WakeUp": _CONTROL,
    "ResetPrefixCache": _CONTROL,
}
"""Of which scopes an rpc needs one. To write takes those of all targets of the session, too."""

_SCOPE_OF_TARGET = {
    Target.VERIFIER: AccessScope.WRITE_VERIFIER,
    Target.DRAFT: AccessScope.WRITE_DRAFT,
}


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
            self.require_any([_SCOPE_OF_TARGET[target]])

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
