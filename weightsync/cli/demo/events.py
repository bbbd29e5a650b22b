"""What the processes of the demo tell each other. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from weightsync.core.types import Target


@dataclass(frozen=True, slots=True)
class Saved:
    """The trainer has written checkpoints."""

    folder: str
    version: str


@dataclass(frozen=True, slots=True)
class Listening:
    """The worker serves."""

    address: str
    sharing: str


@dataclass(frozen=True, slots=True)
class Trained:
    """The trainer has made a step; losses are mean nats per byte."""

    time: float
    step: int
    loss: float
    draft_loss: float


@dataclass(frozen=True, slots=True)
class Pushed:
    """A version is live. `pause_seconds`: how long generation stood still for it.

    `weight_versions`: what each of the worker's models holds since then.
    """

    time: float
    version: str
    num_bytes: int
    num_tensors: int
    seconds: float
    pause_seconds: float
    weight_versions: Mapping[Target, str]


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The worker has put a copy of the draft aside, which gets no updates."""

    time: float
    version: str


@dataclass(frozen=True, slots=True)
class Generated:
    """The worker has written some text with the help of a draft."""

    time: float
    version: str
    updated: bool
    """Whether the draft is the one that gets updates."""
    prompt: str
    text: str
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Observed:
    """VLLM has continued the prompts that it is always asked, greedily.

    `by_position`: accepted tokens by their position in a proposal. `served`: requests that it has
    answered beside these.
    """

    time: float
    tokens: tuple[tuple[int, ...], ...]
    prompt: str
    sample: str
    proposals: int
    proposed: int
    by_position: tuple[int, ...]
    served: int

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that were accepted."""
        return sum(self.by_position) / max(self.proposed, 1)


@dataclass(frozen=True, slots=True)
class Verified:
    """The trainer has compared its weights with the worker's."""

    compared: int
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker shall measure once more and end."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Share of proposed tokens that the last verifier accepts, at the end."""

    with_updates: float
    without_updates: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A process ends early."""

    process: str
    error: str


Event: TypeAlias = (
    "Saved | Listening | Trained | Pushed | LeftBehind | Generated | Observed | Verified | Stop"
    " | Measured | Failed"
)
