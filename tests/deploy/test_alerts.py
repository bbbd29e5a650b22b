from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn
from weightsync_client import Fleet, Worker, push_model

from tests.deploy.promql import OF_PROMETHEUS, Scrape, evaluate, parse, scrape, selectors
from tests.docs.pages import table
from weightsync.core.errors import CommitFailedError, CommitRolledBackError
from weightsync.core.types import Scope
from weightsync.core.views import EventKind
from weightsync.server.server import Server
from weightsync.testing.failpoints import Failpoint, raise_error
from weightsync.testing.models import Tiny, tiny_pair

PATH = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load(PATH.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
BEHIND = 10
"""Commits of the verifier from which on its draft is stale."""

Models = tuple[Tiny, Tiny]
Scene = tuple[Scrape, Scrape, dict[str, int]]


def leave_the_draft(server: Server, _models: Models) -> None:
    """Commit the verifier alone, as often as it takes."""
    for step in range(BEHIND):
        push_model(server.address, tiny_pair(seed=step)[0], version=f"step-{step}")


def expire(server: Server, _models: Models) -> None:
    """Open a session that nobody writes to."""
    with Fleet([server.address]) as fleet, Worker(server.address) as worker:
        events = worker.watch()
        fleet.update(version="v2", scope=Scope.PARTIAL, lease=0.1)
        assert any(event.kind is EventKind.EXPIRED for event in events)


def fail_a_commit(server: Server, _models: Models) -> None:
    """Let a commit fail half-way, which is taken back."""
    remove = server.worker.trace.add(Failpoint("commit.parameter", raise_error, nth=2).hook)
    with pytest.raises(CommitRolledBackError):
        push_model(server.address, *tiny_pair(seed=2), version="v2")
    remove()


def cut_a_tie(server: Server, models: Models) -> None:
    """Replace a parameter of the draft during a commit, as an engine that knows nothing would."""

    def cut(name: str, _facts: dict[str, object]) -> None:
        if name == "commit.parameter":
            models[1].head.weight = nn.Parameter(models[1].head.weight.detach().clone())

    remove = server.worker.trace.add(cut)
    with pytest.raises(CommitFailedError):
        push_model(server.address, *tiny_pair(seed=2), version="v2")
    remove()


SCENES: dict[str, tuple[Callable[[Server, Models], None], dict[str, int]]] = {
    "a draft is left behind": (leave_the_draft, {"WeightSyncDraftStale": 1}),
    "a session expires": (expire, {"WeightSyncSessionExpired": 1}),
    "a commit fails": (fail_a_commit, {"WeightSyncCommitFailed": 2}),
    "a tie is cut": (
        cut_a_tie,
        {
            "WeightSyncCommitFailed": 2,
            "WeightSyncShareGroupBroken": 1,
            "WeightSyncTargetQuarantined": 2,
        },
    ),
}
"""What happens, and how many series of each alert fire then."""


@pytest.fixture(params=SCENES)
def scene(request: pytest.FixtureRequest, server: Server, models: Models) -> Scene:
    """What a worker's metrics were before something happened and after, and what is to fire."""
    happen, expected = SCENES[request.param]
    before = scrape(server)
    happen(server, models)
    return before, scrape(server), expected


def fired(before: Scrape, after: Scrape) -> dict[str, int]:
    """Return how many series of each alert fire."""
    counts = {rule["alert"]: len(evaluate(parse(rule["expr"]), before, after)) for rule in RULES}
    return {alert: count for alert, count in counts.items() if count}


def test_alerts_fire_when_they_should(scene: Scene) -> None:
    """On the metrics of a real worker each alert fires for what it is made for, and only then."""
    before, after, expected = scene
    assert fired(before, before) == {}
    assert fired(before, after) == expected
    assert {alert for _, alerts in SCENES.values() for alert in alerts} == {
        rule["alert"] for rule in RULES
    }


def test_a_stale_draft_is_told_until_it_changes(server: Server) -> None:
    """Nine commits of the verifier are not enough, the tenth is; a push of the draft ends it."""
    first = scrape(server)
    for step in range(BEHIND - 1):
        push_model(server.address, tiny_pair(seed=step)[0], version=f"step-{step}")
    assert fired(first, scrape(server)) == {}
    push_model(server.address, tiny_pair(seed=20)[0], version="step-9")
    assert fired(first, scrape(server)) == {"WeightSyncDraftStale": 1}
    own = {name: t for name, t in tiny_pair()[1].state_dict().items() if name.startswith("fc.")}
    push_model(server.address, None, own, version="step-9", scope=Scope.PARTIAL)
    assert fired(first, scrape(server)) == {}


def test_texts_name_labels_that_are_there(server: Server) -> None:
    """What summaries and descriptions fill in are labels of what the alert asks for."""
    seen = scrape(server)
    for rule in RULES:
        (selector,) = selectors(parse(rule["expr"]))
        have = {name for labels in seen[selector.name] for name, _ in labels} | OF_PROMETHEUS
        text = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= have, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_page_lists_every_alert() -> None:
    """Each alert has its line in the page for operators."""
    listed = [name for name, _ in table("docs/operations.md", "### Dashboard and alerts")]
    assert listed == [f"`{rule['alert']}`" for rule in RULES]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_agrees(tmp_path: Path, scene: Scene) -> None:
    """Prometheus itself, fed with the two scrapes, fires the same alerts."""
    before, after, expected = scene
    series = [
        {"series": _series(name, dict(labels)), "values": f"{old}x9 {value}x9"}
        for name, found in after.items()
        for labels, value in found.items()
        if (old := before.get(name, {}).get(labels)) is not None
    ]
    samples = [{"labels": f'{{alertname="{a}"}}', "value": n} for a, n in expected.items()]
    test = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "12m",
        "exp_samples": samples,
    }
    document = {
        "rule_files": [str(PATH)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [test]}],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    promtool = shutil.which("promtool")
    assert promtool
    done = subprocess.run(
        [promtool, "test", "rules", path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _series(name: str, labels: dict[str, str]) -> str:
    pairs = ", ".join(f'{key}="{value}"' for key, value in (labels | {"instance": "w"}).items())
    return f"{name}{{{pairs}}}"
