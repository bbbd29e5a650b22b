"""Files that are renewed while the server runs: certificates and tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from structlog.typing import FilteringBoundLogger

from weightsync.core.errors import InvalidRequestError

T = TypeVar("T")


class Watched(Generic[T]):
    """What some files say now; while they say nothing sensible, what they said before.

    They are read anew whenever they are asked for, which is once per connection or call: small
    files cost microseconds, and no clock and no thread decides when a change is seen.
    """

    def __init__(
        self, paths: Sequence[Path], make: Callable[..., T], log: FilteringBoundLogger
    ) -> None:
        """Read the files for the first time.

        Args:
            paths: The files.
            make: Makes the value of their contents, in that order; raises InvalidRequestError.
            log: Is told of changes.

        Raises:
            InvalidRequestError: a file can't be read, or the contents make no value.
        """
        self._paths = paths
        self._make = make
        self._log = log
        self._lock = threading.Lock()
        self._contents = self._read()
        self._value = make(*self._contents)
        self._trouble = ""

    def get(self) -> T:
        """Return the value; the same object while the files are the same."""
        with self._lock:
            try:
                contents = self._read()
                if contents != self._contents:
                    self._value = self._make(*contents)
                    self._contents = contents
                    self._log.info("files.renewed", files=self._names())
                self._trouble = ""
            except InvalidRequestError as error:
                # Once, not for each connection that comes meanwhile.
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    self._log.error("files.refused", files=self._names(), cause=self._trouble)
            return self._value

    def _read(self) -> tuple[bytes, ...]:
        return tuple(map(_read, self._paths))

    def _names(self) -> list[str]:
        return [str(path) for path in self._paths]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(
            f"can't read {path}: {error.strerror}", subjects=[str(path)]
        ) from error
