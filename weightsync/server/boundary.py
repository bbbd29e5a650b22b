"""The one place where requests become Python values and errors become status codes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_status import rpc_status
from structlog.typing import FilteringBoundLogger

from weightsync.core.errors import InternalError, WeightSyncError
from weightsync.server.access import Access, scopes_of
from weightsync.server.silent import SilentCalls
from weightsync.server.tracing import Follow
from weightsync.wire.convert import parse_message
from weightsync.wire.status import status_of

Behavior = Callable[[Any, grpc.ServicerContext], Any]
"""A method of a servicer: takes a message, or an iterator of raw ones; returns one, or many."""

Admit = AbstractContextManager[None]
"""Lets a call in, or raises what the caller is to be told."""


class Boundary:
    """Stands around every handler: asks callers who they are, parses, tells what went wrong.

    Handlers get and give raw bytes, as gRPC has them. With gRPC's own deserializers a request that
    is no message would end as INTERNAL, as if it were the worker's fault.
    """

    def __init__(
        self,
        log: FilteringBoundLogger,
        access: Access,
        follow: Follow,
        silent: SilentCalls | None = None,
    ) -> None:
        """Let in whom access allows; write tracebacks, which never leave the worker, to a log.

        Sessions are in the hands of methods that answer once: `follow` stands around those.
        """
        self._log = log
        self._follow = follow
        self._access = access
        self._silent = silent or SilentCalls()

    def unary(self, method: MethodDescriptor, behavior: Behavior, admit: Admit) -> Behavior:
        """Wrap a method that answers once."""
        scopes = scopes_of(method)

        def handle(request: Any, call: grpc.ServicerContext) -> bytes:  # noqa: ANN401
            with self._telling(method, call) as known:
                self._access.caller(call).require_any(scopes)
                message = self._request(method, request, call)
                with admit, self._follow(call):
                    known.update(_names(message))
                    return _to_bytes(behavior(message, call))

        return handle

    def stream(self, method: MethodDescriptor, behavior: Behavior, admit: Admit) -> Behavior:
        """Wrap a method that answers many times."""
        scopes = scopes_of(method)

        def handle(request: Any, call: grpc.ServicerContext) -> Iterator[bytes]:  # noqa: ANN401
            with self._telling(method, call):
                self._access.caller(call).require_any(scopes)
                message = self._request(method, request, call)
                with admit:
                    for answer in behavior(message, call):
                        yield _to_bytes(answer)

        return handle

    def _request(
        self, method: MethodDescriptor, messages: Iterator[bytes], call: grpc.ServicerContext
    ) -> Any:  # noqa: ANN401
        """Parse a single request; the messages of a client's stream stay raw."""
        if method.client_streaming:
            return messages
        request = self._silent.request(messages, call)
        return parse_message(GetMessageClass(method.input_type), request)

    @contextmanager
    def _telling(
        self, method: MethodDescriptor, call: grpc.ServicerContext
    ) -> Iterator[dict[str, str]]:
        """Yield what the log is to say of the call as well, to be filled when it is known."""
        known: dict[str, str] = {}
        try:
            yield known
        except WeightSyncError as error:
            self._log.info(
                "call.refused",
                rpc=method.name,
                reason=error.reason.name,
                cause=str(error),
                peer=call.peer(),
                **known,
            )
            _abort(call, error)
        except grpc.RpcError:
            # gRPC's own way to say that the client is gone: nobody is left to be told.
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the caller gets a proper status
            correlation_id = uuid.uuid4().hex
            self._log.exception(
                "call.failed", rpc=method.name, correlation_id=correlation_id, **known
            )
            _abort(
                call,
                InternalError(
                    f"{method.name} failed inside the worker; its log says more under the"
                    f" correlation id {correlation_id}",
                    correlation_id=correlation_id,
                ),
            )


def _abort(call: grpc.ServicerContext, error: WeightSyncError) -> NoReturn:
    call.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError


def _names(message: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the session that a request names, shortened to more than any of ours has."""
    session_id: str = getattr(message, "session_id", "")
    return {"session_id": session_id[:64]} if session_id else {}


def _to_bytes(answer: Message | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
