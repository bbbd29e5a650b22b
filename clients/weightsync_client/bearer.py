"""The token on its way: in the metadata of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from weightsync_client.credentials import Credentials


class TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
):
    """Adds the token to each call of a channel.

    gRPC's own call credentials refuse unix sockets and this host, where nobody listens in.
    """

    def __init__(self, credentials: Credentials) -> None:
        """Ask credentials for the token of each call."""
        self._credentials = credentials

    def _intercept(
        self,
        go_on: Callable[[grpc.ClientCallDetails, Any], Any],
        details: grpc.ClientCallDetails,
        request: Any,  # noqa: ANN401 - a message, or an iterator of them
    ) -> Any:  # noqa: ANN401 - the call
        return go_on(_WithToken(details, self._credentials.bearer()), request)

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept


class _WithToken(grpc.ClientCallDetails):
    """A call's own metadata and the token; for the rest gRPC takes what the caller has said."""

    def __init__(self, details: grpc.ClientCallDetails, bearer: str) -> None:
        self.metadata = (*(details.metadata or ()), ("authorization", bearer))
