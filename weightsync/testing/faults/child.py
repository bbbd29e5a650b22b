"""The parent's end of a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from tempfile import TemporaryFile
from typing import Any, TypeVar

from typing_extensions import Self

T = TypeVar("T")

PATIENCE = 240.0
"""How long anything may take before a test fails, in seconds."""

_SHOWN = 4000


class BrokenPromiseError(AssertionError):
    """Something happened that must not, or did not happen that must."""


def promise(holds: object, text: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise BrokenPromiseError(text)


def until(probe: Callable[[], T | None], what: str) -> T:
    """Ask again and again until the answer is true."""
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while True:
        if found := probe():
            return found
        promise(time.monotonic() < end, f"never happened: {what}")
        pause.wait(0.02)


class Child:
    """A process that obeys commands and tells what happens, see `talk`."""

    def __init__(self, module: str, *args: str) -> None:
        """Start `python -m MODULE ARGS`."""
        # Shown when it fails its parent: what it logs of faults that are meant is no news.
        self._errors = TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Ctrl-C is for the parent, which ends its children.
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._told: list[tuple[str, Any]] = []
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def hear(self, *kinds: str) -> tuple[str, Any]:
        """Wait for the next thing of some kinds that it tells.

        Raises:
            BrokenPromiseError: it has ended, or takes too long.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._next(kinds) is not None, PATIENCE)
            index = self._next(kinds)
            if index is None:
                raise self._silence(kinds)
            return self._told.pop(index)

    def heard(self, kind: str) -> bool:
        """Tell whether it has told something of a kind that nobody has taken yet.

        Raises:
            BrokenPromiseError: it has not, and has ended.
        """
        with self._changed:
            if self._next((kind,)) is not None:
                return True
            if self._ended:
                raise self._silence((kind,))
            return False

    def _silence(self, kinds: tuple[str, ...]) -> BrokenPromiseError:
        why = "ended" if self._ended else "was silent"
        return BrokenPromiseError(f"a process {why} instead of {kinds}: {self.errors()}")

    def forget(self) -> None:
        """Take what it has told and nobody wanted to know."""
        with self._changed:
            self._told.clear()

    def errors(self) -> str:
        """Return the end of what it wrote to its standard error."""
        self._errors.seek(0)
        return self._errors.read()[-_SHOWN:]

    def ask(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - whatever it is asked for
        """Give a command and wait until it is done."""
        pipe = self._process.stdin
        if pipe is not None:
            pipe.write(json.dumps({"do": do, **arguments}) + "\n")
            pipe.flush()
        return self.hear(do)[1]

    def arm(self, event: str, nth: int = 1, act: str = "freeze") -> None:
        """Let something happen at the nth time of a step's event."""
        self.ask("arm", event=event, nth=nth, act=act)

    def go(self) -> None:
        """Let go on what is frozen at a failpoint, and let nothing happen any more."""
        self.ask("go")

    def stop(self) -> None:
        """Let the whole process stand still."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as nobody should."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def close(self) -> None:
        """End it, and what belongs to it here. Idempotent."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, kinds: tuple[str, ...]) -> int | None:
        return next((i for i, (kind, _) in enumerate(self._told) if kind in kinds), None)

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            told = json.loads(line)
            with self._changed:
                self._told.append((told["kind"], told["value"]))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
