from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, table


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def functions(path: Path) -> set[str]:
    """Return the names of all functions and classes of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Each link to a file of the repository, and to a heading in it, is right."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    """Each test that a page names is in the file that it names."""
    text = page.read_text(encoding="utf-8")
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        assert (ROOT / path).exists(), path
        assert name in functions(ROOT / path), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Each source file that a page names by its path is there."""
    text = page.read_text(encoding="utf-8")
    roots = "weightsync|clients|tests|protos|requirements|docs|benchmarks"
    for path in re.findall(rf"`((?:{roots})/[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists(), path


def test_the_index_lists_every_page() -> None:
    """Who starts at docs/index.md finds every page below docs."""
    index = ROOT / "docs" / "index.md"
    text = index.read_text(encoding="utf-8")
    pages = [p for p in (ROOT / "docs").glob("*.md") if p != index]
    assert [p.name for p in pages if f"({p.name})" not in text] == []


def test_every_decision_is_listed() -> None:
    """The list of decisions has each of them, with its title."""
    folder = ROOT / "docs" / "adr"
    text = (folder / "README.md").read_text(encoding="utf-8")
    for page in folder.glob("0*.md"):
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert f"[{title}]({page.name})" in text


def test_contributors_find_every_folder_of_tests() -> None:
    """The page for contributors says what each folder of tests is for."""
    rows = {folder.strip("`") for folder, _ in table("CONTRIBUTING.md", "## Tests")}
    assert rows == {str(p.parent.relative_to(ROOT)) for p in ROOT.glob("tests/*/test_*.py")}
