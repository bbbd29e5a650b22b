from __future__ import annotations

from tests.docs.pages import blocks, read, run, table
from weightsync.core.trace import CLIENT_STEPS, WORKER_STEPS
from weightsync.testing.faults.cases import covering, matrix

PAGE = "docs/faults.md"


def test_the_page_lists_every_step() -> None:
    """Each step of both sides is there, in the order of the code."""
    for steps, heading in (
        (WORKER_STEPS, "In a worker, `weightsync.serve(..., trace=trace)`:"),
        (CLIENT_STEPS, "In a client, `Fleet(..., trace=trace)`:"),
    ):
        wanted = [[f"`{s.name}`", "span" if s.span else "point", s.text] for s in steps]
        assert table(PAGE, heading) == wanted


def test_the_example_runs() -> None:
    """The program of the page rolls a commit back."""
    (block,) = blocks(PAGE, "python")
    run(block, PAGE, {})


def test_the_page_counts_the_cases() -> None:
    """The sizes of the matrix are those of the code."""
    assert f"{len(matrix())} cases" in read(PAGE)
    assert f"plays {len(covering())} of them" in read(PAGE)
