"""Bearer tokens: a worker keeps their hashes, and what each allows."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, Field, ValidationError, field_validator

from weightsync.core.errors import InvalidRequestError
from weightsync.server.scopes import AccessScope

_PREFIX = "wsync_"
"""Lets scanners for secrets, and people, tell what they have found."""

_BYTES = 32


class Token(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
    """What a worker knows of a token; the token itself is its holder's alone.

    Attributes:
        name: Who has it, for logs and for those who find a target busy.
        sha256: Its hash, in hexadecimal. A plain one will do: tokens are random and long, so that
            nobody can try them all, however fast a hash is computed.
        scopes: What it allows.
        expires: When it ends; None: never.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[tuple[AccessScope, ...], Field(min_length=1)]
    expires: AwareDatetime | None = None

    @property
    def expired(self) -> bool:
        """Tell whether its time is over."""
        return self.expires is not None and self.expires <= datetime.now(timezone.utc)


class TokenFile(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
    """The tokens of a worker, as a file of JSON holds them.

    Attributes:
        tokens: Each with a name of its own.
    """

    tokens: tuple[Token, ...] = ()

    @field_validator("tokens")
    @classmethod
    def _check_names(cls, tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        if len({token.name for token in tokens}) != len(tokens):
            raise ValueError("two tokens have one name")
        return tokens

    @classmethod
    def parse(cls, content: bytes) -> TokenFile:
        """Return the tokens of a file's content.

        Raises:
            InvalidRequestError: it is no such file.
        """
        with _telling():
            return cls.model_validate_json(content)

    def with_token(
        self,
        name: str,
        secret: str,
        scopes: Iterable[AccessScope],
        expires: datetime | None = None,
    ) -> TokenFile:
        """Return these tokens and one more.

        Raises:
            InvalidRequestError: no scope, or a name that is none or is taken.
        """
        with _telling():
            added = Token(
                name=name,
                sha256=digest(secret),
                scopes=tuple(dict.fromkeys(scopes)),
                expires=expires,
            )
            return TokenFile(tokens=(*self.tokens, added))

    def without(self, name: str) -> TokenFile:
        """Return these tokens without that of a name.

        Raises:
            InvalidRequestError: there is none.
        """
        kept = tuple(token for token in self.tokens if token.name != name)
        if len(kept) == len(self.tokens):
            raise InvalidRequestError(f"there is no token of the name {name}", subjects=["name"])
        return TokenFile(tokens=kept)

    def find(self, secret: str) -> Token | None:
        """Return the token that somebody showed, if it is one of these.

        All hashes are compared, each in constant time: how long it takes tells nothing.
        """
        shown = digest(secret)
        found = None
        for token in self.tokens:
            if hmac.compare_digest(token.sha256, shown):
                found = token
        return found


def digest(secret: str) -> str:
    """Return the hash of a token, as a file holds it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_secret() -> str:
    """Return a random token."""
    return _PREFIX + secrets.token_urlsafe(_BYTES)


@contextmanager
def _telling() -> Iterator[None]:
    """Tell what is wrong, and nothing of what was written: it may be a token, in a wrong place."""
    try:
        yield
    except ValidationError as error:
        wrong = "; ".join(
            f"{_place(found['loc'])}: {found['msg']}"
            for found in error.errors(include_input=False, include_url=False)
        )
        raise InvalidRequestError(
            f"these tokens can't be used: {wrong}; `weightsync token new` writes what can",
            subjects=["tokens"],
        ) from None


def _place(path: Sequence[int | str]) -> str:
    known = {*TokenFile.model_fields, *Token.model_fields}
    return ".".join(str(p) if isinstance(p, int) or p in known else "?" for p in path) or "file"
