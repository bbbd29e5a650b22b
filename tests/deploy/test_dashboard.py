from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest

from tests.deploy.promql import OF_PROMETHEUS, parse, parts, scrape, select, selectors
from weightsync.server.server import Server

PATH = Path(__file__).parents[2] / "deploy/grafana/dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [(panel, target) for panel in PANELS for target in panel["targets"]]


def test_every_query_finds_series(server: Server) -> None:
    """Each query parses, and each of its metrics and labels is one of a real worker."""
    seen = scrape(server)
    for _, target in QUERIES:
        for selector in selectors(parse(target["expr"])):
            assert select(selector, seen), target["expr"]


def test_every_label_is_one_of_its_metric(server: Server) -> None:
    """What is grouped by, and what legends and tables show, are labels of what is asked for."""
    seen = scrape(server)
    for panel, target in QUERIES:
        expression = parse(target["expr"])
        have = set(OF_PROMETHEUS)
        for selector in selectors(expression):
            have |= {name for labels in seen[selector.name] for name, _ in labels}
        for part in parts(expression):
            if isinstance(part, promql.AggregateExpr) and part.modifier:
                assert set(part.modifier.labels) <= have, target["expr"]
                # Nothing else is left to be shown.
                have = set(part.modifier.labels) - {"le"}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= have, target
        for step in panel.get("transformations", ()):
            assert set(step["options"]["include"]["names"]) <= have


def test_every_metric_is_shown(server: Server) -> None:
    """No metric of a worker is left out."""
    asked = {s.name for _, target in QUERIES for s in selectors(parse(target["expr"]))}
    suffixes = ("_created", "_count", "_sum")
    assert asked == {name for name in scrape(server) if not name.endswith(suffixes)}


def test_the_worker_can_be_chosen(server: Server) -> None:
    """The variable lists instances of a metric that each worker has, and each query heeds it."""
    (variable,) = (v for v in DASHBOARD["templating"]["list"] if v["name"] == "instance")
    match = re.fullmatch(r"label_values\((\w+), instance\)", variable["query"]["query"])
    assert match
    assert match[1] in scrape(server)
    for _, target in QUERIES:
        for selector in selectors(promql.parse(re.sub(r"\$__\w+", "5m", target["expr"]))):
            chosen = [m.value for m in selector.matchers.matchers if m.name == "instance"]
            assert chosen == ["$instance"], target["expr"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_is_told_apart(panel: dict[str, Any]) -> None:
    """A panel has a title, a sentence on what it shows, a unit, and the chosen data source."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert {source["uid"] for source in sources} == {"${datasource}"}
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_panels_do_not_overlap() -> None:
    """Ids are unique, and each place of the grid is taken by one panel at most."""
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        mine = set(itertools.product(range(x, x + w), range(y, y + h)))
        assert x + w <= 24
        assert not mine & cells, panel["title"]
        cells |= mine
