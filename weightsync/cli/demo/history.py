"""What happened in a run of the demo, as series of numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from weightsync.cli.demo.events import (
    Event,
    Generated,
    LeftBehind,
    Listening,
    Measured,
    Pushed,
    Trained,
    Verified,
)

_WINDOW = 10
"""Generations over which the acceptance rate is taken: one alone has few proposals."""


@dataclass
class Acceptance:
    """Share of proposed tokens that the verifier accepts, over the last few generations."""

    times: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    _last: deque[Generated] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def add(self, generated: Generated) -> None:
        """Count a generation."""
        self._last.append(generated)
        proposed = sum(g.proposed for g in self._last)
        self.times.append(generated.time)
        self.rates.append(sum(g.accepted for g in self._last) / max(proposed, 1))

    @property
    def now(self) -> float | None:
        """The rate now; None before the first generation."""
        return self.rates[-1] if self.rates else None


@dataclass
class History:
    """All events of a run, sorted by what they are."""

    trained: list[Trained] = field(default_factory=list)
    pushed: list[Pushed] = field(default_factory=list)
    acceptance: dict[bool, Acceptance] = field(
        default_factory=lambda: {True: Acceptance(), False: Acceptance()}
    )
    first: Generated | None = None
    last: Generated | None = None
    left_behind: LeftBehind | None = None
    listening: Listening | None = None
    verified: Verified | None = None
    measured: Measured | None = None

    def add(self, event: Event) -> None:
        """Take an event."""
        match event:
            case Trained():
                self.trained.append(event)
            case Pushed():
                self.pushed.append(event)
            case Generated():
                self.acceptance[event.updated].add(event)
                if event.updated:
                    self.first = self.first or event
                    self.last = event
            case LeftBehind():
                self.left_behind = event
            case Listening():
                self.listening = event
            case Verified():
                self.verified = event
            case Measured():
                self.measured = event
            case _:
                pass

    @property
    def equal(self) -> bool:
        """Whether the worker's weights were found to be the trainer's, bit for bit."""
        found = self.verified
        return found is not None and found.compared > 0 and not found.differences

    def losses(self, last: int = 10) -> tuple[float, float]:
        """Return the mean loss of the first steps and of the last ones."""
        values = [trained.loss for trained in self.trained]
        return fmean(values[:last]), fmean(values[-last:])

    def as_json(self) -> dict[str, object]:
        """Return the result for programs."""
        pauses = [pushed.pause_seconds * 1000 for pushed in self.pushed]
        first, last = self.losses()
        return {
            "steps": self.trained[-1].step,
            "pushes": len(self.pushed),
            "version": self.pushed[-1].version,
            "loss": {"first": first, "last": last},
            "acceptance": {
                "with_updates": self.measured and self.measured.with_updates,
                "without_updates": self.measured and self.measured.without_updates,
            },
            "pause_ms": {"median": median(pauses), "max": max(pauses)},
            "bytes_per_push": self.pushed[-1].num_bytes,
            "mb_per_s": median(map(rate, self.pushed)),
            "verified": {
                "equal": self.equal,
                "compared": self.verified.compared if self.verified else 0,
                "differences": self.verified.differences if self.verified else (),
            },
            "sample": {"first": _text(self.first), "last": _text(self.last)},
        }


def rate(pushed: Pushed) -> float:
    """Return megabytes per second of a push, from its start to the commit's answer."""
    return pushed.num_bytes / pushed.seconds / 1e6


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and those before it, `window` at most."""
    return [fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def _text(generated: Generated | None) -> str:
    return generated.text if generated else ""
