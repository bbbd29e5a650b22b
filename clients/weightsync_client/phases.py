"""The two phases of a commit over many workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from weightsync.core.errors import WeightSyncError
from weightsync_client.member import Member

S = TypeVar("S")
T = TypeVar("T")

_log = logging.getLogger(__name__)


def concurrently(function: Callable[[S], T], items: Sequence[S]) -> list[T | WeightSyncError]:
    """Call a function for all items at once; each gives its result or its error."""

    def attempt(item: S) -> T | WeightSyncError:
        try:
            return function(item)
        except WeightSyncError as error:
            return error

    if len(items) == 1:
        return [attempt(items[0])]
    # What the caller's context says, such as the span that it is in, holds for all of them.
    contexts = [copy_context() for _ in items]
    with ThreadPoolExecutor(max(1, len(items)), "weightsync") as pool:
        return list(pool.map(lambda own, item: own.run(attempt, item), contexts, items))


def first_error(results: Sequence[object]) -> WeightSyncError | None:
    """Return the first error among results."""
    return next((r for r in results if isinstance(r, WeightSyncError)), None)


def all_or_raise(function: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Call a function for all items at once; return all results.

    Raises:
        WeightSyncError: the first error.
    """
    results: list[T] = []
    for result in concurrently(function, items):
        if isinstance(result, WeightSyncError):
            raise result
        results.append(result)
    return results


def prepare_all(members: Sequence[Member]) -> None:
    """Take the first phase on all workers; if one fails, all sessions are dropped.

    Raises:
        WeightSyncError: the first failure. All workers keep what they hold.
    """
    error = first_error(concurrently(Member.prepare, members))
    if error is not None:
        abort_all(members, f"prepare failed: {error}")
        raise error


def finish_all(members: Sequence[Member]) -> list[WeightSyncError | None]:
    """Take the second phase on all workers; return each one's error."""
    results = concurrently(Member.finish, members)
    return [r if isinstance(r, WeightSyncError) else None for r in results]


def abort_all(members: Sequence[Member], cause: str) -> None:
    """Drop all sessions. One that can't be told drops its session when the lease ends."""
    results = concurrently(lambda member: member.abort(cause), members)
    for member, result in zip(members, results, strict=True):
        if isinstance(result, WeightSyncError):
            _log.warning("session %s was not aborted: %s", member.session_id, result)
