"""What happened in a run, scene by scene, and whether it is what should happen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from weightsync.cli.demo.events import (
    Event,
    Listening,
    Observed,
    Pushed,
    Saved,
    Trained,
    Verified,
)
from weightsync.core.types import Target

_MUCH = 0.5
"""Share of the acceptance that a stale draft must cost, and a push of the draft bring back."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A state of vLLM.

    Attributes:
        pushed: What was pushed; None where vLLM has just loaded a checkpoint.
        loaded: The version of the checkpoints that vLLM has started from.
        observed: What vLLM said and accepted then.
    """

    pushed: Pushed | None
    loaded: str
    observed: Observed

    @property
    def targets(self) -> frozenset[Target]:
        """Which models the push has changed."""
        if self.pushed is None:
            return frozenset()
        held = self.pushed.weight_versions.items()
        return frozenset(target for target, version in held if version == self.pushed.version)

    def version(self, target: Target) -> str:
        """Return what a model holds."""
        held = self.pushed.weight_versions.get(target) if self.pushed else None
        return held or self.loaded

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of the proposals of which so many tokens, at least, were accepted."""
        found = self.observed
        return tuple(accepted / max(found.proposals, 1) for accepted in found.by_position)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a forward pass of the verifier yields: its own, and those accepted."""
        return 1.0 + sum(self.by_position)

    def as_json(self) -> dict[str, object]:
        """Return the scene for programs."""
        return {
            "pushed": sorted(map(str, self.targets)),
            "versions": {str(target): self.version(target) for target in Target},
            "acceptance": self.observed.acceptance,
            "by_position": self.by_position,
            "tokens_per_step": self.tokens_per_step,
            "pause_ms": self.pushed.pause_seconds * 1000 if self.pushed else None,
            "bytes": self.pushed.num_bytes if self.pushed else None,
            "sample": self.observed.sample,
        }


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the story."""

    text: str
    holds: bool


@dataclass
class Story:
    """All scenes of a run."""

    scenes: list[Scene] = field(default_factory=list)
    trained: Trained | None = None
    listening: Listening | None = None
    verified: Verified | None = None
    _saved: Saved | None = None
    _pushed: Pushed | None = None

    def add(self, event: Event) -> None:
        """Take an event."""
        match event:
            case Trained():
                self.trained = event
            case Saved():
                self._saved, self._pushed = event, None
            case Listening():
                self.listening = event
            case Pushed():
                self._pushed = event
            case Verified():
                self.verified = event
            case Observed():
                loaded = self._saved.version if self._saved else ""
                self.scenes.append(Scene(self._pushed, loaded, event))
            case _:
                pass

    def claims(self) -> Iterator[Claim]:
        """Yield what this run should show; all scenes have to be there."""
        start, stale, renewed, *rounds, fresh = self.scenes
        before, low, after = (s.observed.acceptance for s in (start, stale, renewed))
        together = [scene.observed.acceptance for scene in rounds]
        last = rounds[-1]
        yield Claim(
            f"the verifier alone was pushed: acceptance fell from {before:.0%} to {low:.0%}",
            stale.targets == {Target.VERIFIER} and low < _MUCH * before,
        )
        yield Claim(
            f"the draft alone was pushed: acceptance is back at {after:.0%}",
            renewed.targets == {Target.DRAFT} and after - low > _MUCH * (before - low),
        )
        yield Claim(
            "the draft changed the speed, and no token",
            renewed.observed.tokens == stale.observed.tokens,
        )
        yield Claim(
            f"both were pushed in one session, {len(rounds)} times: "
            f"acceptance never fell below {min(together):.0%}",
            all(len(scene.targets) == len(Target) for scene in rounds)
            and min(together) - low > _MUCH * (before - low),
        )
        yield Claim(
            "vLLM holds the trainer's weights, bit for bit: "
            + ", ".join(self.differences or [f"{self.compared} tensors compared"]),
            self.compared > 0 and not self.differences,
        )
        yield Claim(
            f"a fresh vLLM, started from a checkpoint of {fresh.loaded}, says the same tokens, "
            "and accepts the same",
            fresh.observed.tokens == last.observed.tokens
            and fresh.observed.by_position == last.observed.by_position,
        )

    def as_json(self) -> dict[str, object]:
        """Return the result for programs; all scenes have to be there."""
        return {
            "scenes": [scene.as_json() for scene in self.scenes],
            "claims": [{"text": claim.text, "holds": claim.holds} for claim in self.claims()],
            "compared": self.compared,
            "differences": self.differences,
        }

    @property
    def compared(self) -> int:
        """Number of tensors that were compared with the trainer's."""
        return self.verified.compared if self.verified else 0

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of those that differ."""
        return self.verified.differences if self.verified else ()
