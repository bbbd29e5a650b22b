"""Names that a target does not have: which one was meant, and which may be ignored."""

from __future__ import annotations

import difflib
import fnmatch
import heapq
import re
from collections.abc import Iterable, Sequence

from weightsync.core.errors import InvalidRequestError, UnknownTensorError
from weightsync.core.types import Target

MAX_PATTERNS = 256
"""Most ignore patterns of a session."""

MAX_PATTERN_LENGTH = 256
"""Longest ignore pattern, in characters."""

_COMPARED = 160
"""Characters of a name that are compared, from its end: the end tells layers and modules apart.

Fewer than 200, from which on difflib leaves out characters that are frequent.
"""

_SHORTLIST = 24
"""Names that are compared character by character, which is slow."""


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that looks most like a name, or None if none looks like it.

    The time is bounded by a few cheap operations per candidate, however long the name is.
    """
    tail = name[-_COMPARED:]
    parts, letters = set(tail.split(".")), set(tail)

    def likeness(candidate: str) -> tuple[int, int, int]:
        shared = parts.intersection(candidate.split("."))
        different = abs(len(candidate) - len(tail))
        return sum(map(len, shared)), len(letters.intersection(candidate)), -different

    shortlist = heapq.nlargest(_SHORTLIST, candidates, key=likeness)
    by_tail = {candidate[-_COMPARED:]: candidate for candidate in reversed(shortlist)}
    matches = difflib.get_close_matches(tail, by_tail, n=1)
    return by_tail[matches[0]] if matches else None


def unknown_tensor(target: Target, name: str, candidates: Iterable[str]) -> UnknownTensorError:
    """Return the error for a tensor that its target does not have.

    Args:
        target: The target.
        name: What was asked for.
        candidates: The names that the target has.
    """
    known = closest(name, candidates)
    hint = f"; the closest name is {shorten(known)!r}" if known else "; no name is like it"
    return UnknownTensorError(
        f"the {target} has no tensor {shorten(name)!r}{hint}. Map the name, or list it in"
        " ignore_names if it is not needed",
        subjects=[name],
    )


def shorten(name: str, length: int = 120) -> str:
    """Return a name that is fit for a message: its middle is left out if it is longer."""
    if len(name) <= length:
        return name
    half = length // 2
    return f"{name[:half]}...{name[-half:]}"


class IgnorePatterns:
    """Shell-style patterns (`*`, `?`, `[...]`) of names that may be sent without being known."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Compile the patterns.

        Raises:
            InvalidRequestError: one is empty or too long, or there are too many.
        """
        if len(patterns) > MAX_PATTERNS:
            raise InvalidRequestError(
                f"{len(patterns)} patterns in ignore_names are more than {MAX_PATTERNS};"
                " use wildcards",
                subjects=["ignore_names"],
            )
        for index, pattern in enumerate(patterns):
            if not 0 < len(pattern) <= MAX_PATTERN_LENGTH:
                raise InvalidRequestError(
                    f"ignore_names[{index}] has {len(pattern)} characters; allowed are 1 to"
                    f" {MAX_PATTERN_LENGTH}",
                    subjects=[f"ignore_names[{index}]"],
                )
        self._compiled = tuple(re.compile(fnmatch.translate(pattern)) for pattern in patterns)

    def match(self, name: str) -> bool:
        """Tell whether a pattern fits the whole name; upper and lower case differ."""
        return any(pattern.match(name) for pattern in self._compiled)
