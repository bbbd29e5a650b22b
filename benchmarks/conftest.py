"""Collects the rows of all benchmarks; at the end a table, and one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.samples import Row
from weightsync.core.malloc import tune_malloc

_ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    """Start without rows. The sender is this process, and it is ours."""
    config.stash[_ROWS] = []
    tune_malloc()


@pytest.fixture
def rows(pytestconfig: pytest.Config) -> list[Row]:
    """Rows of the table, to be added to."""
    return pytestconfig.stash[_ROWS]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the table, and behind everything else one JSON object."""
    rows = config.stash.get(_ROWS, [])
    if not rows:
        return
    writer = config.get_terminal_writer()
    writer.line()
    line = "{:40} {:>7} {:>6} {:>13} {:>12} {:>11}  {}".format
    writer.line(line("", "s", "GB/s", "min-max", "CPU s/GiB", "extra MiB", "ratio to"))
    for row in rows:
        writer.line(
            line(
                row.name,
                f"{row.seconds:.3f}",
                f"{row.gb_per_second:.2f}",
                f"{row.slowest:.2f}-{row.fastest:.2f}",
                " + ".join(f"{c:.2f}" for c in row.cpu_seconds_per_gib),
                " / ".join(map(str, row.extra_mib)),
                "" if row.ratio is None else f"{row.ratio:.2f}  {row.beside}",
            )
        )
    writer.line(json.dumps({row.name: _figures(row) for row in rows}))


def _figures(row: Row) -> dict[str, object]:
    figures = asdict(row)
    del figures["name"]
    return {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in figures.items()
    }
