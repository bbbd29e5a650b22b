from __future__ import annotations

import io
import json
import logging

import pytest

from weightsync.core.types import Target
from weightsync.server.logs import LogFormat, make_logger, trace_log


def test_steps_become_json_lines() -> None:
    """A step is one line with its name, level, time and facts in plain words."""
    stream = io.StringIO()
    hook = trace_log(make_logger(LogFormat.JSON, stream))
    hook("session.started", {"session_id": "s1", "targets": frozenset({Target.DRAFT})})
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("timestamp").endswith("Z")
    assert told == {
        "event": "session.started",
        "level": "info",
        "session_id": "s1",
        "targets": ["draft"],
    }


class Gone(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str, /) -> int:
        """Fail, as a broken pipe does."""
        raise BrokenPipeError(text)


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.CONSOLE])
def test_a_log_that_nobody_reads_fails_nothing(log_format: LogFormat) -> None:
    """Lines for a reader that has gone, or into a closed stream, are lost and nothing else is."""
    closed = io.StringIO()
    closed.close()
    make_logger(log_format, Gone()).info("lost")
    if log_format is LogFormat.JSON:
        make_logger(log_format, closed).info("lost")


def test_failures_are_louder() -> None:
    """What failed is an error, with the cause as text."""
    stream = io.StringIO()
    hook = trace_log(make_logger(LogFormat.JSON, stream, logging.ERROR))
    hook("commit.completed", {"session_id": "s1"})
    hook("commit.failed", {"session_id": "s1", "error": ValueError("why")})
    hook("session.ended", {"session_id": "s1", "outcome": "aborted"})
    hook("session.ended", {"session_id": "s1", "outcome": "failed"})
    failed, ended = map(json.loads, stream.getvalue().splitlines())
    assert failed["error"] == "ValueError: why"
    assert ended["outcome"] == "failed"


def test_no_payload_is_logged() -> None:
    """Bytes and objects are left out of log lines, and chunks are not told at all."""
    stream = io.StringIO()
    hook = trace_log(make_logger(LogFormat.JSON, stream, logging.DEBUG))
    hook("chunk.completed", {"session_id": "s1", "nbytes": 5})
    hook("prepare.completed", {"session_id": "s1", "payload": b"secret", "thing": object()})
    (line,) = stream.getvalue().splitlines()
    assert not {"payload", "thing"} & json.loads(line).keys()


def test_the_console_shows_the_event() -> None:
    """The console form is for eyes: the event and its facts, without colours in a file."""
    stream = io.StringIO()
    make_logger(LogFormat.CONSOLE, stream).warning("abort", session_id="s1")
    assert "abort" in stream.getvalue()
    assert "session_id=s1" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_inside_a_host_the_hosts_logging_decides(caplog: pytest.LogCaptureFixture) -> None:
    """The default log goes through the standard library's logger and writes nothing itself."""
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, logger="weightsync.server"):
        make_logger(LogFormat.HOST, stream).info("session.started", session_id="s1")
    (record,) = caplog.records
    assert "session_id='s1'" in record.getMessage()
    assert not stream.getvalue()
