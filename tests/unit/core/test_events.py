from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from weightsync.core.errors import TooManyStreamsError
from weightsync.core.events import EventLog, EventStream
from weightsync.core.types import Target
from weightsync.core.views import Event, EventKind


def publish(log: EventLog, count: int = 1) -> list[int]:
    """Publish some events; return their sequences."""
    return [log.publish(EventKind.STARTED, time=float(n)).sequence for n in range(count)]


def ready(stream: EventStream) -> Iterator[Event]:
    """Yield what can be had without waiting."""
    while event := stream.next(timeout=0):
        yield event


def sequences(stream: EventStream) -> list[int]:
    """Return the sequences of what can be had without waiting."""
    return [event.sequence for event in ready(stream)]


def test_an_event_is_what_was_published() -> None:
    """A watcher gets the event that `publish` returned, with all its facts."""
    log = EventLog()
    stream = log.subscribe()
    event = log.publish(
        EventKind.ABORTED, [Target.DRAFT, Target.DRAFT], "s1", "v2", "asked", time=1.5
    )
    assert event == Event(1, 1.5, EventKind.ABORTED, frozenset({Target.DRAFT}), "s1", "v2", "asked")
    assert list(ready(stream))[1:] == [event]


def test_the_first_event_is_watching() -> None:
    """A new watcher is told at once that it is connected, and the last sequence so far."""
    log = EventLog()
    publish(log, 3)
    first = log.subscribe().next(timeout=0)
    assert first is not None
    assert (first.kind, first.sequence) == (EventKind.WATCHING, 3)


def test_only_new_events_by_default() -> None:
    """Without a sequence, history is not told again."""
    log = EventLog()
    publish(log, 3)
    stream = log.subscribe()
    publish(log, 2)
    assert sequences(stream) == [3, 4, 5]


@pytest.mark.parametrize(("after", "expected"), [(1, [2, 3]), (3, []), (99, [])])
def test_history_is_told_again(after: int, expected: list[int]) -> None:
    """Events after a known one come first; one that never was counts as the last."""
    log = EventLog()
    publish(log, 3)
    stream = log.subscribe(after)
    assert sequences(stream) == [3, *expected]
    assert publish(log) == [4]
    assert sequences(stream) == [4]


def test_history_goes_back_as_far_as_it_is_remembered() -> None:
    """What was forgotten shows as a gap."""
    log = EventLog(capacity=2)
    publish(log, 5)
    assert sequences(log.subscribe(1)) == [5, 4, 5]


def test_a_slow_watcher_loses_the_oldest() -> None:
    """Publishing never waits; whoever is too slow sees a gap, and then all of the rest."""
    log = EventLog(capacity=3)
    stream = log.subscribe()
    publish(log, 2)
    assert [event.sequence for event in (stream.next(0), stream.next(0)) if event] == [0, 1]
    publish(log, 100)
    assert sequences(stream) == [100, 101, 102]


def test_no_event_before_the_timeout() -> None:
    """A timeout gives None and leaves the stream open."""
    stream = EventLog().subscribe()
    stream.next(timeout=0)
    assert stream.next(timeout=0.001) is None
    assert not stream.closed


def test_a_waiting_watcher_is_woken() -> None:
    """An event that is published while a thread waits reaches it."""
    log = EventLog()
    with ThreadPoolExecutor(1) as pool, closing(log.subscribe()) as stream:
        stream.next()
        waiting = pool.submit(stream.next)
        publish(log)
        event = waiting.result()
        assert event is not None
        assert event.sequence == 1


def test_closing_a_stream_wakes_its_reader() -> None:
    """A thread that waits for ever gets None when another thread closes its stream."""
    log = EventLog()
    with ThreadPoolExecutor(1) as pool:
        stream = log.subscribe()
        stream.next()
        waiting = pool.submit(stream.next)
        stream.close()
        stream.close()
        assert waiting.result() is None
    assert stream.closed
    publish(log)
    assert stream.next() is None


def test_closing_the_log_ends_all_streams() -> None:
    """Each stream tells what was published before the end, and then None."""
    log = EventLog()
    streams = [log.subscribe() for _ in range(3)]
    publish(log, 2)
    log.close()
    log.close()
    for stream in streams:
        assert not stream.closed
        assert sequences(stream) == [0, 1, 2]
        assert stream.next() is None
        assert stream.closed


def test_watchers_are_limited() -> None:
    """One more than allowed is refused until another one leaves."""
    log = EventLog(max_watchers=2)
    first, _ = log.subscribe(), log.subscribe()
    with pytest.raises(TooManyStreamsError, match="2 watchers") as caught:
        log.subscribe()
    assert caught.value.retry_after
    first.close()
    log.subscribe()


def test_many_publishers_and_watchers() -> None:
    """With threads on both sides each watcher sees each event once, in order."""
    log, publishers, watchers, each = EventLog(), 4, 4, 50
    start = threading.Barrier(publishers + watchers)

    def send() -> None:
        start.wait()
        publish(log, each)

    def watch(stream: EventStream) -> list[int]:
        start.wait()
        seen = []
        while event := stream.next():
            seen.append(event.sequence)
        return seen

    with ThreadPoolExecutor(publishers + watchers) as pool:
        watching = [pool.submit(watch, log.subscribe()) for _ in range(watchers)]
        for sending in [pool.submit(send) for _ in range(publishers)]:
            sending.result()
        log.close()
        for future in watching:
            assert future.result() == list(range(publishers * each + 1))
