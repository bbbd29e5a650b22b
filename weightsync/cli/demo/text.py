"""The text that the demo learns: English that every Python brings along."""

from __future__ import annotations

import pydoc_data.topics
import string
from collections.abc import Callable
from typing import TypeAlias

import torch

VOCAB_SIZE = 256
"""A token is a byte."""

_SHOWN = frozenset(string.printable.encode()) - frozenset(b"\t\r\x0b\x0c")


def corpus() -> torch.Tensor:
    """Return Python's own language reference as tokens, uint8 of shape (about 460 000,)."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    # A tenth of a percent is typographic quotes, which cost three tokens each.
    return torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8)


def batch(tokens: torch.Tensor, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return random pieces of a text, int64 of shape (size, length)."""
    starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    return tokens[starts + torch.arange(length)].long()


Exercise: TypeAlias = Callable[[torch.Tensor, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
"""Turns pieces of text (size, length) into what is read (size, length) and what is to be said
after each token but the last (size, length - 1)."""


def plain(tokens: torch.Tensor, _generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """To go on as the text does."""
    return tokens, tokens[:, 1:]


def capitals(tokens: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """To go on in capitals, after an ordinary beginning of any length."""
    small = (tokens >= ord("a")) & (tokens <= ord("z"))
    shouted = torch.where(small, tokens - (ord("a") - ord("A")), tokens)
    size, length = tokens.shape
    begins = torch.randint(length, (size, 1), generator=generator)
    read = torch.where(torch.arange(length) < begins, tokens, shouted)
    return read, shouted[:, 1:]


def prompt(tokens: torch.Tensor, length: int, generator: torch.Generator) -> list[int]:
    """Return the beginning of a random sentence, for the worker to go on with."""
    capital = (tokens >= ord("A")) & (tokens <= ord("Z"))
    starts = torch.nonzero((tokens[: -length - 1] == ord("\n")) & capital[1:-length]).flatten() + 1
    start = int(starts[torch.randint(len(starts), (), generator=generator)])
    return [int(token) for token in tokens[start : start + length]]


def readable(tokens: list[int]) -> str:
    """Return tokens as text; what a terminal can't show becomes a dot."""
    return "".join(chr(t) if t in _SHOWN else "·" for t in tokens)
