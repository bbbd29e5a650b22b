"""What was shared between verifier and draft, what was not, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from weightsync.loader.places import Place


class Verdict(str, enum.Enum):
    """What was decided about a pair of tensors."""

    DECLARED = "declared"
    """The draft has no copy of its own, or says that it has none: it holds the verifier's."""
    DISCOVERED = "discovered"
    """The draft's copy was bit-identical: it holds the verifier's, the copy is freed."""
    ALREADY = "already"
    """Both were one storage before."""
    DISTINCT = "distinct"
    """At least one bit differs: both are kept."""
    NOT_SHARED = "not_shared"
    """They can't be, or must not be, one; the cause says why."""

    @property
    def shared(self) -> bool:
        """Whether verifier and draft hold one storage."""
        return self in (Verdict.DECLARED, Verdict.DISCOVERED, Verdict.ALREADY)

    def __str__(self) -> str:
        """Return the word as reports use it."""
        return self.value.replace("_", " ")


class Cause(str, enum.Enum):
    """Why a pair was not shared."""

    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    NOT_PLAIN = "not_plain"
    """A quantized, sharded or otherwise wrapped layer or tensor."""
    NOT_IN_VERIFIER = "not_in_verifier"
    """The verifier has none, or this pipeline stage does not own it."""
    NOT_IN_DRAFT = "not_in_draft"
    """The draft has no such place, or this pipeline stage does not own it."""
    EXCLUDED = "excluded"
    """The caller switched sharing off for this name."""
    INNER_TIE = "inner_tie"
    """The draft ties it to another tensor, which stands where it stands."""


class Tie(str, enum.Enum):
    """How a shared pair is one."""

    OBJECT = "object"
    """Both models hold the same `Parameter` (or buffer, or module) object."""
    VIEW = "view"
    """Two objects over one storage: the tie breaks if either gets a new `.data`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor of the verifier, the draft's beside it, and what was decided.

    Attributes:
        place: Role in the model.
        verifier: Name in the verifier; None if it has none.
        draft: Names in the draft: all that hold this tensor; empty if it has none.
        verdict: The decision.
        reason: The decision explained, for people.
        cause: Why it was not shared; None for other verdicts.
        tie: How it is shared; None if it isn't.
        num_bytes: Size of the tensor, in bytes.
        bytes_saved: Bytes of the draft's own storage that were freed by sharing.
    """

    place: Place
    verifier: str | None
    draft: tuple[str, ...]
    verdict: Verdict
    reason: str
    cause: Cause | None = None
    tie: Tie | None = None
    num_bytes: int = 0
    bytes_saved: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the pair as JSON values."""
        return {
            "place": self.place.value,
            "verifier": self.verifier,
            "draft": list(self.draft),
            "verdict": self.verdict.value,
            "reason": self.reason,
            "cause": self.cause and self.cause.value,
            "tie": self.tie and self.tie.value,
            "num_bytes": self.num_bytes,
            "bytes_saved": self.bytes_saved,
        }


@dataclass(frozen=True, slots=True)
class SharingReport:
    """All pairs that were looked at. Holds names and numbers only, no tensors."""

    pairs: tuple[Pair, ...]

    @property
    def shared(self) -> tuple[Pair, ...]:
        """The pairs that are one storage."""
        return tuple(pair for pair in self.pairs if pair.verdict.shared)

    @property
    def shared_bytes(self) -> int:
        """Bytes of all tensors that verifier and draft hold together."""
        return sum({pair.verifier: pair.num_bytes for pair in self.shared}.values())

    @property
    def bytes_saved(self) -> int:
        """Bytes of the draft's own copies that were freed."""
        return sum(pair.bytes_saved for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "pairs": [pair.to_dict() for pair in self.pairs],
            "shared_bytes": self.shared_bytes,
            "bytes_saved": self.bytes_saved,
        }

    def render(self) -> str:
        """Return the report as a table for people, with a line of totals."""
        header = ("place", "verifier", "draft", "verdict", "size", "saved", "reason")
        rows: list[tuple[str, ...]] = [header]
        rows += [
            (
                pair.place.value,
                pair.verifier or "-",
                ", ".join(pair.draft) or "-",
                str(pair.verdict),
                _size(pair.num_bytes),
                _size(pair.bytes_saved),
                pair.reason,
            )
            for pair in self.pairs
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, tuple("-" * width for width in widths))
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        total = (
            f"{len(self.shared)} of {len(self.pairs)} pairs shared: "
            f"{_size(self.shared_bytes)} held together, {_size(self.bytes_saved)} freed"
        )
        return "\n".join([*lines, total])

    def __str__(self) -> str:
        return self.render()


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:  # noqa: PLR2004 - bytes per KiB
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
