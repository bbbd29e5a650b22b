from __future__ import annotations

import pytest

from tests.docs.pages import blocks, run

PAGE = "docs/client.md"


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of the page, from top to bottom, are one program that works."""
    names: dict[str, object] = {"__name__": "client_page"}
    for block in blocks(PAGE, "python"):
        run(block, PAGE, names)
    told = capsys.readouterr().out
    # Each error that the page catches was really raised.
    assert "value_haed.weight" in told
    assert "is one storage with the verifier's" in told
    assert "trainer-a" in told
