"""What PromQL expressions ask for, and what they come to on scrapes of a real worker."""

from __future__ import annotations

import operator
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

from weightsync.server.server import Server

Labels = frozenset[tuple[str, str]]
Scrape = dict[str, dict[Labels, float]]
"""Series by metric name and labels."""

OF_PROMETHEUS = frozenset({"instance", "job"})
"""Labels that Prometheus adds to all that it scrapes."""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


def scrape(server: Server) -> Scrape:
    """Ask a worker for its metrics."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as answer:
        text = answer.read().decode()
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def parse(expression: str) -> promql.Expr:
    """Parse an expression, with Grafana's variables replaced by what Grafana would put there."""
    for name in ("$__rate_interval", "$__range"):
        expression = expression.replace(name, "5m")
    return promql.parse(expression.replace("$instance", ".*"))


def parts(expression: promql.Expr) -> Iterator[Any]:
    """Yield an expression and all that it consists of."""
    yield expression
    below: list[Any] = []
    match expression:
        case promql.AggregateExpr():
            below = [expression.expr]
        case promql.BinaryExpr():
            below = [expression.lhs, expression.rhs]
        case promql.Call():
            below = list(expression.args)
        case promql.MatrixSelector():
            below = [expression.vector_selector]
    for part in below:
        yield from parts(part)


def selectors(expression: promql.Expr) -> list[Any]:
    """Return what an expression selects."""
    return [part for part in parts(expression) if isinstance(part, promql.VectorSelector)]


def select(selector: Any, seen: Scrape) -> dict[Labels, float]:
    """Return the series that a selector takes, as if Prometheus had scraped them.

    Raises:
        KeyError: there is no such metric, or it has no such label.
    """
    found = {}
    for labels, value in seen[selector.name].items():
        have = dict(labels) | dict.fromkeys(OF_PROMETHEUS, "worker")
        if all(_matches(matcher, have[matcher.name]) for matcher in selector.matchers.matchers):
            found[labels] = value
    return found


def _matches(matcher: Any, value: str) -> bool:
    if matcher.op == promql.MatchOp.Re:
        return re.fullmatch(matcher.value, value) is not None
    assert matcher.op == promql.MatchOp.Equal, matcher
    return bool(matcher.value == value)


def evaluate(expression: promql.Expr, before: Scrape, after: Scrape) -> dict[Labels, float]:
    """Return what an alert's expression comes to; increases are those between two scrapes."""
    match expression:
        case promql.VectorSelector():
            return select(expression, after)
        case promql.Call() if expression.func.name == "increase":
            (matrix,) = expression.args
            assert isinstance(matrix, promql.MatrixSelector)
            first = select(matrix.vector_selector, before)
            last = select(matrix.vector_selector, after)
            # As in Prometheus, a series that was not there before has no increase.
            return {labels: last[labels] - first[labels] for labels in last.keys() & first.keys()}
        case promql.BinaryExpr():
            compare, limit = _COMPARISONS[str(expression.op)], expression.rhs
            assert isinstance(limit, promql.NumberLiteral)
            found = evaluate(expression.lhs, before, after)
            return {labels: value for labels, value in found.items() if compare(value, limit.val)}
    raise AssertionError(f"no alert needs {expression}; keep them simple, or teach this")
