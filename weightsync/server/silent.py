"""Calls whose request has not come yet: they hold a thread, and must not hold all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeVar, final

import grpc

from weightsync.core.errors import MalformedPayloadError

T = TypeVar("T")

MAX_SILENT = 16
"""Most calls at once whose request has not come; each takes a thread of its own."""


@final
class SilentCalls:
    """Waits for the one request of a call; when too many wait, the one that waits longest ends.

    gRPC would wait for ever in the thread that is to answer. An honest caller's request comes
    with the call, so it is never the one that has waited longest. Whether a call may send one
    message or many is not seen on the wire, so all are taken as streams of requests.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._lock = threading.Lock()
        # In the order in which they came.
        self._calls: dict[int, grpc.ServicerContext] = {}

    def request(self, messages: Iterator[T], call: grpc.ServicerContext) -> T:
        """Return the request of a call.

        Raises:
            MalformedPayloadError: there is none.
            grpc.RpcError: the call was ended.
        """
        oldest = None
        with self._lock:
            self._calls[id(call)] = call
            if len(self._calls) > MAX_SILENT:
                oldest = self._calls.pop(next(iter(self._calls)))
        if oldest is not None:
            oldest.cancel()
        try:
            return next(messages)
        except StopIteration:
            raise MalformedPayloadError("the call has ended without a request") from None
        finally:
            with self._lock:
                self._calls.pop(id(call), None)
