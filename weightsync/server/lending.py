"""The arenas of a worker, and the clients on the same host that may map them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.arena.arena import Arena, Arenas
from weightsync.arena.handover import Handover
from weightsync.core.errors import PermissionDeniedError, UnsupportedError
from weightsync.core.types import Transport, UpdateMode, UpdateRequest
from weightsync.server.books import Books


class Lending:
    """Decides which way a session's bytes take, and hands its arena to who may write into it.

    Attributes:
        arenas: Where arenas come from and go to.
    """

    def __init__(self, books: Books) -> None:
        """Lend to nobody yet."""
        self._books = books
        self._handover = Handover(self._lent, self._gone)
        self.arenas = Arenas(books.limits.max_spare_bytes, self._handover.knows)

    def listen(self, name: str) -> None:
        """Lend from now on, over a socket of that name.

        Raises:
            InvalidRequestError: the name can't be had.
        """
        self._handover.listen(name)

    @property
    def socket(self) -> str:
        """Name of the socket; empty: none."""
        return self._handover.name

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The ways that bytes can take here, the best first."""
        shared = (Transport.SHARED_MEMORY,) if self.socket else ()
        return (*shared, Transport.INLINE)

    def choose(self, request: UpdateRequest) -> Transport:
        """Return the first of a caller's ways that its session can take.

        Raises:
            UnsupportedError: there is none.
        """
        for transport in request.transports:
            if transport is Transport.INLINE:
                return transport
            if request.mode is UpdateMode.STAGED and self._handover.knows(request.shared_memory_id):
                return transport
        raise UnsupportedError(
            "this session's bytes can come inline only: shared memory needs mode STAGED and a"
            " caller on the same host, who has connected to the worker's socket; offer"
            " TRANSPORT_INLINE as well"
        )

    @contextmanager
    def _lent(self, session_id: str, client: str) -> Iterator[Arena]:
        # With the lock held no session can end, and no arena be closed.
        with self._books.lock:
            update = self._books.update(session_id)
            if update.session.transport is not Transport.SHARED_MEMORY or update.arena is None:
                raise not_shared(session_id)
            if client not in update.borrowers:
                raise PermissionDeniedError(
                    f"nobody who may write session {session_id} asked for its arena on this"
                    " connection: call ListPlacements first",
                    scope="write",
                )
            yield update.arena

    def _gone(self, client: str) -> None:
        self.arenas.drop(client)

    def close(self) -> None:
        """Lend no more, keep nothing."""
        self._handover.close()
        self.arenas.close()


def not_shared(session_id: str) -> UnsupportedError:
    """Return what a caller is told who takes a session's way for another."""
    return UnsupportedError(
        f"session {session_id} does not use shared memory: see its transport; send payloads"
    )
