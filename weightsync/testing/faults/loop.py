"""What an engine does that serves: one forward after the other."""

from __future__ import annotations

import threading
from typing import Any

from weightsync.core.errors import QuarantinedError
from weightsync.testing.faults.net import Net, answer


class Loop:
    """Calls both models for ever, as an engine does that serves."""

    def __init__(self, verifier: Net, draft: Net) -> None:
        self._models = {"verifier": verifier, "draft": draft}
        self._lock = threading.Lock()
        self._rounds = 0
        self._refused = 0
        self._answers: dict[str, set[str]] = {name: set() for name in self._models}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Call no more: torch must not run in a thread that the interpreter leaves behind."""
        self._stop.set()
        self._thread.join()

    def take(self) -> dict[str, Any]:
        """Return what happened since the last time."""
        with self._lock:
            taken = {
                "rounds": self._rounds,
                "refused": self._refused,
                "answers": {name: sorted(seen) for name, seen in self._answers.items()},
            }
            self._rounds = self._refused = 0
            self._answers = {name: set() for name in self._models}
        return taken

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            for name, model in self._models.items():
                self._call(name, model)
            with self._lock:
                self._rounds += 1

    def _call(self, name: str, model: Net) -> None:
        try:
            seen = answer(model)
        except QuarantinedError:
            with self._lock:
                self._refused += 1
        else:
            with self._lock:
                self._answers[name].add(seen)
