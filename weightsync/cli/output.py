"""Results go to standard output, progress to standard error and only to a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_json(value: object) -> None:
    """Print a value as one line of JSON, at once."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    """Print a line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows: a table for a person, values with tabs between for a program."""
    if not sys.stdout.isatty():
        print_line("\t".join(columns))
        for row in rows:
            print_line("\t".join(" ".join(str(value).split()) for value in row))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row))
    Console().print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values, a line each."""
    width = max(map(len, facts)) if sys.stdout.isatty() else 0
    separator = "  " if width else "\t"
    for name, value in facts.items():
        print_line(f"{name:<{width}}{separator}{value}")


def size(num_bytes: float) -> str:
    """Return a number of bytes for people, e.g. `4.2 MB`."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:  # noqa: PLR2004 - of each unit
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
