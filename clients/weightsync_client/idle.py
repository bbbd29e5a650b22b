"""Streams of answers have no deadline over all, but a limit to their silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol, TypeVar

import grpc

from weightsync_client.errors import DeadlineError, from_rpc
from weightsync_client.forks import process

T = TypeVar("T")
Item_co = TypeVar("Item_co", covariant=True)


class Messages(Protocol[Item_co]):
    """The answers of a call, which can be cancelled."""

    def __next__(self) -> Item_co:
        """Wait for the next one."""

    def cancel(self) -> bool:
        """End the call."""


def iterate(call: Messages[T], worker: str, idle: float | None) -> Iterator[T]:
    """Yield the answers of a call, which is ended with the iterator.

    Args:
        call: The running call.
        worker: Address of the worker, for errors.
        idle: Longest wait for one answer, in seconds; None: for ever.

    Raises:
        DeadlineError: the worker was silent for too long.
        WeightSyncError: what it said instead.
    """
    try:
        while True:
            process.check()
            watchdog = _Watchdog(call, idle)
            try:
                with watchdog:
                    message = next(call)
            except StopIteration:
                return
            except grpc.RpcError as error:
                if watchdog.bitten:
                    raise DeadlineError(
                        f"{worker}: no message within {idle} s", worker=worker
                    ) from None
                raise from_rpc(error, worker) from None
            yield message
    finally:
        if not process.is_crippled:
            call.cancel()


class _Watchdog:
    """Cancels a call that is silent for too long."""

    def __init__(self, call: Messages[object], limit: float | None) -> None:
        self.bitten = False
        self._call = call
        self._timer = None if limit is None else threading.Timer(limit, self._bite)

    def _bite(self) -> None:
        self.bitten = True
        self._call.cancel()

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
