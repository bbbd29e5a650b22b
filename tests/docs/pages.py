"""The pages of the documentation: their code, their tables, their links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/README.md")],
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        language: What stands behind the opening fence.
        text: What is inside.
        line: Number of its first line in the page, from 1.
    """

    language: str
    text: str
    line: int


def read(name: str) -> str:
    """Return the text of a page, by its path from the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[Block]:
    """Return the blocks of a page that are in a language."""
    text = read(name)
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1)
        for match in found
        if match[1] == language
    ]


def table(name: str, heading: str) -> list[list[str]]:
    """Return the rows, without the head, of the first table below a heading of a page."""
    section = read(name).split(f"\n{heading}\n", 1)[1]
    match = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert match is not None, f"{name} has no table below {heading!r}"
    rows = [line.strip()[1:-1].split("|") for line in match[0].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def run(block: Block, page: str, names: dict[str, object]) -> None:
    """Run a block of Python; tracebacks show its lines in the page."""
    padded = "\n" * (block.line - 1) + block.text
    exec(compile(padded, str(ROOT / page), "exec"), names)  # noqa: S102
