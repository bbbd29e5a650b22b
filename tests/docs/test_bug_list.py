from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bugs.md"
ROW = re.compile(r"^\| (B\d\d) \| .+ \| (`.+`) \|$", re.MULTILINE)


def test_every_report_is_held_by_tests() -> None:
    """Each of the 88 reports has a row, in order, and each row names a test."""
    numbers = [number for number, _ in ROW.findall(PAGE.read_text())]
    assert numbers == [f"B{number:02}" for number in range(1, 89)]


def test_each_test_exists_and_names_its_report() -> None:
    """A row's tests are there, and their docstrings bear the report's number."""
    for number, cell in ROW.findall(PAGE.read_text()):
        for named in re.findall(r"`([^`]+)`", cell):
            file, _, name = named.partition("::")
            tree = ast.parse((ROOT / "tests" / file).read_text())
            found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
            assert found, f"{number}: there is no {named}"
            assert number in ast.unparse(found[0]), f"{named} does not name {number}"
