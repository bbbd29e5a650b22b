from __future__ import annotations

import pytest

from weightsync.core.trace import Trace

Seen = list[tuple[str, dict[str, object]]]


def recorded() -> tuple[Trace, Seen]:
    """Return a trace and what it tells."""
    seen: Seen = []
    return Trace(lambda name, facts: seen.append((name, dict(facts)))), seen


def test_a_point_is_told_once() -> None:
    """A point reaches each hook with its facts."""
    trace, seen = recorded()
    trace("abort", session_id="s", cause="asked")
    assert seen == [("abort", {"session_id": "s", "cause": "asked"})]


def test_a_span_that_completes() -> None:
    """A span tells of its start, and of its end with its time and the facts found meanwhile."""
    trace, seen = recorded()
    with trace.span("commit", session_id="s") as facts:
        assert seen == [("commit.started", {"session_id": "s"})]
        facts["tensors"] = 3
    name, told = seen[-1]
    assert name == "commit.completed"
    assert (told["session_id"], told["tensors"]) == ("s", 3)
    assert isinstance(told["seconds"], float)
    assert told["seconds"] >= 0


def test_a_span_that_fails() -> None:
    """An exception is told and goes on."""
    trace, seen = recorded()
    error = KeyError("x")
    with pytest.raises(KeyError) as caught, trace.span("commit"):
        raise error
    assert caught.value is error
    name, told = seen[-1]
    assert name == "commit.failed"
    assert told["error"] is error
    assert "seconds" in told


def test_what_a_hook_raises_the_step_raises() -> None:
    """A hook can make a step fail, which is how faults are injected; the span fails with it."""
    trace, seen = recorded()

    def broken(name: str, facts: dict[str, object]) -> None:
        if name == "commit.parameter":
            raise OSError(facts["parameter"])

    trace.add(broken)
    with pytest.raises(OSError, match="w"), trace.span("commit"):
        trace("commit.parameter", parameter="w")
    assert [name for name, _ in seen] == ["commit.started", "commit.parameter", "commit.failed"]


def test_a_start_that_is_refused_has_failed() -> None:
    """A hook that refuses a start fails the step for all hooks, those before it knew of it."""
    trace, seen = recorded()

    def broken(name: str, facts: dict[str, object]) -> None:
        if name.endswith(".started"):
            raise OSError(name)

    trace.add(broken)
    with pytest.raises(OSError, match="commit"), trace.span("commit"):
        raise AssertionError
    assert [name for name, _ in seen] == ["commit.started", "commit.failed"]


def test_facts_can_be_bound() -> None:
    """What is bound is told of each step, to hooks that come later too; the step's own win."""
    trace, seen = recorded()
    bound = trace.bound(session_id="s", target="draft").bound(target="verifier")
    bound("commit.parameter", parameter="w")
    with bound.span("rollback", target="both"):
        pass
    trace("session.ended")
    assert [dict(facts, seconds=0) for _, facts in seen[:3]] == [
        {"session_id": "s", "target": "verifier", "parameter": "w", "seconds": 0},
        {"session_id": "s", "target": "both", "seconds": 0},
        {"session_id": "s", "target": "both", "seconds": 0},
    ]
    assert seen[3] == ("session.ended", {})


def test_what_has_happened_stands(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that fails at the end of a step neither fails it nor keeps the others from hearing."""
    seen: list[str] = []

    def broken(name: str, facts: dict[str, object]) -> None:
        if not name.endswith(".started"):
            raise OSError(name)

    trace = Trace(broken, lambda name, facts: seen.append(name))
    with trace.span("commit"):
        pass
    with pytest.raises(KeyError), trace.span("prepare"):
        raise KeyError
    trace.told("session.ended", session_id="s")
    assert seen == [
        "commit.started", "commit.completed", "prepare.started", "prepare.failed", "session.ended",
    ]  # fmt: skip
    assert len(caplog.records) == 3


def test_a_hook_can_be_taken_away() -> None:
    """A hook that was taken away hears nothing more, also when it does so while being told."""
    trace, seen = recorded()
    heard: list[str] = []

    def once(name: str, facts: dict[str, object]) -> None:
        heard.append(name)
        take_away()

    take_away = trace.add(once)
    trace("a")
    trace("b")
    assert heard == ["a"]
    assert [name for name, _ in seen] == ["a", "b"]
