"""Structured logs of what happens to sessions. No payload and no weight ever gets into them."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

LOGGER_NAME = "weightsync.server"

_UNTOLD = ("chunk", "commit.parameter")
"""Steps that come thousands of times per session: metrics count them."""

_LEVELS = {
    "session.ended.expired": logging.WARNING,
    "session.ended.failed": logging.ERROR,
    "quarantine": logging.ERROR,
    "commit.failed": logging.ERROR,
    "rollback.started": logging.WARNING,
    "rollback.completed": logging.WARNING,
    "rollback.failed": logging.ERROR,
}


class LogFormat(enum.Enum):
    """How log lines are written."""

    HOST = "host"
    JSON = "json"
    CONSOLE = "console"


def make_logger(
    log_format: LogFormat, stream: TextIO, level: int = logging.INFO
) -> FilteringBoundLogger:
    """Return a logger that changes nothing outside itself.

    Args:
        log_format: HOST hands lines of `key=value` to the standard library's logger
            `weightsync.server`, as fits a worker inside somebody else's process; the others write
            one line per event to `stream`.
        stream: Where JSON and CONSOLE write.
        level: Lowest level of `logging` that is written.
    """
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
    ]
    if log_format is LogFormat.HOST:
        processors.append(structlog.processors.KeyValueRenderer(key_order=["event"]))
        target: object = logging.getLogger(LOGGER_NAME)
    else:
        processors.insert(0, structlog.processors.TimeStamper(fmt="iso", utc=True))
        processors.append(
            structlog.processors.JSONRenderer()
            if log_format is LogFormat.JSON
            else structlog.dev.ConsoleRenderer(colors=stream.isatty())
        )
        target = structlog.WriteLogger(cast("TextIO", _Unfailing(stream)))
    logger = structlog.wrap_logger(
        target,
        processors,
        structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    return cast("FilteringBoundLogger", logger)


class _Unfailing:
    """A stream whose reader may go: a worker must not fail because nobody reads its log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def trace_log(log: FilteringBoundLogger) -> Callable[[str, dict[str, object]], None]:
    """Return a trace hook that writes each step of a session to a log."""

    def hook(name: str, facts: dict[str, object]) -> None:
        if name.startswith(_UNTOLD):
            return
        told = {key: text for key, fact in facts.items() if (text := _told(fact)) is not None}
        key = f"{name}.{facts['outcome']}" if "outcome" in facts else name
        log.log(_LEVELS.get(key, logging.INFO), name, **told)

    return hook


def _told(fact: object) -> object:
    """Return a fact as a log shows it; None for what does not belong there."""
    if isinstance(fact, enum.Enum):
        return str(fact) if type(fact).__str__ is not enum.Enum.__str__ else fact.name.lower()
    if isinstance(fact, str | int | float):
        return fact
    if isinstance(fact, BaseException):
        return f"{type(fact).__name__}: {fact}"
    if isinstance(fact, frozenset | set | tuple | list):
        return sorted(str(_told(item)) for item in fact)
    return None
