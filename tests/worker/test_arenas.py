"""Staging memory between sessions: freed, or kept for the next one if the limits allow it."""

from __future__ import annotations

import pytest
from torch import nn

from tests.worker.feeding import fresh, push, request, same_bits
from weightsync.arena.arena import Arena, Arenas
from weightsync.core.errors import IncompleteError
from weightsync.core.types import Limits, Target
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker


def test_an_arena_is_kept_for_the_next_session_of_its_size() -> None:
    """What comes back is given out again, to those who need as much; others get new memory."""
    arenas = Arenas(10_000)
    first, second = arenas.take(4096), arenas.take(4096)
    arenas.give_back(first)
    larger = arenas.take(8192)
    assert larger is not first
    assert arenas.take(4096) is first
    for arena in (first, second, larger):
        arena.close()


def test_no_more_is_kept_than_the_limit_says() -> None:
    """The oldest memory goes first; without a limit nothing is kept."""
    arenas = Arenas(10_000)
    given = [Arena(6000), Arena(4000), Arena(5000), Arena(10_001)]
    for arena in given[:3]:
        arenas.give_back(arena)
    assert _closed(given[0])
    assert not _closed(given[1])
    assert not _closed(given[2])
    arenas.give_back(given[3])
    assert all(map(_closed, given))
    none = Arenas(0)
    arena = none.take(4096)
    none.give_back(arena)
    assert _closed(arena)


def test_nothing_is_kept_after_the_end() -> None:
    """Closing gives back what is kept, and what comes later."""
    arenas = Arenas(10_000)
    kept, late = arenas.take(4096), arenas.take(4096)
    arenas.give_back(kept)
    arenas.close()
    arenas.give_back(late)
    assert _closed(kept)
    assert _closed(late)


def test_a_kept_arena_lends_no_bytes_to_the_next_session() -> None:
    """What an aborted session brought counts for nothing in the next one."""
    module = nn.Linear(64, 64)
    worker = Worker(ModuleEngine(module), limits=Limits(max_spare_bytes=1 << 20))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    aborted = worker.start(request())
    push(worker, aborted.session_id, Target.VERIFIER, fresh(before))
    worker.abort(aborted.session_id)
    assert worker.staging_bytes == 0
    session = worker.start(request())
    with pytest.raises(IncompleteError):
        worker.finish(session.session_id)
    new = fresh(before)
    push(worker, session.session_id, Target.VERIFIER, new)
    worker.finish(session.session_id)
    assert all(same_bits(tensor, new[name]) for name, tensor in module.state_dict().items())
    worker.close()


def _closed(arena: Arena) -> bool:
    try:
        arena.view(0, 1)
    except ValueError:
        return True
    return False
