"""Prometheus metrics of one worker, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightsync.core.errors import InvalidRequestError
from weightsync.core.types import SessionState, Target, TargetState
from weightsync.server.settings import ServerConfig
from weightsync.server.worker import Worker

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Buckets from a small module to a model of hundreds of gigabytes."""


class Metrics:
    """Counts what the trace tells, asks the worker for the rest, and serves both at `/metrics`.

    Labels are targets and outcomes: names of tensors and sessions would grow without bound. Of
    versions only those that are held now have a series, one per target.

    Attributes:
        registry: Of this worker alone, so that several servers fit into one process.
        address: Where `/metrics` listens; None if it does not.
    """

    def __init__(self, worker: Worker, config: ServerConfig) -> None:
        """Start to count, and to serve if the config has a port.

        Raises:
            InvalidRequestError: the port can't be had.
        """
        self.registry = registry = prometheus.CollectorRegistry()
        targets = {status.target for status in worker.info().targets}
        self._sessions = prometheus.Counter(
            "weightsync_sessions",
            "Sessions that ended, per target, by how they ended.",
            ["target", "outcome"],
            registry=registry,
        )
        # From the start, since Prometheus sees no increase in a series that appears with a 1.
        for target in targets:
            for state in SessionState:
                if state.ended:
                    self._sessions.labels(str(target), state.name.lower())
        self._bytes = prometheus.Counter(
            "weightsync_received_bytes", "Payload bytes taken, repeats included.", registry=registry
        )
        self._chunks = prometheus.Counter(
            "weightsync_received_chunks", "UpdateWeights messages taken.", registry=registry
        )
        self._receive = prometheus.Histogram(
            "weightsync_receive_duration_seconds",
            "Time from the start of a committed session until it was prepared.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._prepare = prometheus.Histogram(
            "weightsync_prepare_duration_seconds",
            "Time of the checks before a commit.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._apply = prometheus.Histogram(
            "weightsync_apply_duration_seconds",
            "Time of a commit, waiting for the step boundary included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._pause = prometheus.Histogram(
            "weightsync_engine_pause_seconds",
            "Time that generation stood still for a commit.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._shares = prometheus.Counter(
            "weightsync_share_groups_checked",
            "Share groups looked at after commits, by whether they still are one storage.",
            ["result"],
            registry=registry,
        )
        for result in ("shared", "broken"):
            self._shares.labels(result)
        self._behind: prometheus.Gauge | None = None
        if targets == {Target.VERIFIER, Target.DRAFT}:
            self._behind = prometheus.Gauge(
                "weightsync_draft_commits_behind",
                "Commits of the verifier since the draft last changed; absent without a draft.",
                registry=registry,
            )
        registry.register(_State(worker))
        self.address: str | None = None
        if config.metrics_port is not None:
            self._listen(config.metrics_host, config.metrics_port)

    def hook(self, name: str, facts: dict[str, Any]) -> None:
        """Count a step; a trace hook."""
        match name:
            case "chunk.completed":
                self._bytes.inc(facts["nbytes"])
                self._chunks.inc()
            case "prepare.completed":
                self._prepare.observe(facts["seconds"])
            case "commit.completed":
                self._receive.observe(facts["receive"])
                self._apply.observe(facts["seconds"])
                self._pause.observe(facts["pause"])
            case "share.checked":
                self._shares.labels("broken").inc(facts["broken"])
                self._shares.labels("shared").inc(facts["groups"] - facts["broken"])
            case "session.ended":
                for target in facts["targets"]:
                    self._sessions.labels(str(target), facts["outcome"]).inc()
                if facts["outcome"] == "committed":
                    self._count_behind(facts["targets"])

    def _count_behind(self, targets: list[str]) -> None:
        if self._behind is None:
            return
        if str(Target.DRAFT) in targets:
            self._behind.set(0)
        else:
            self._behind.inc()

    def close(self) -> None:
        """Stop to serve. Idempotent."""
        if self.address is not None:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
            self.address = None

    def _listen(self, host: str, port: int) -> None:
        try:
            self._http, self._thread = prometheus.start_http_server(port, host, self.registry)
        except OSError as error:
            raise InvalidRequestError(
                f"can't serve metrics on {host}:{port}: {error}; choose another metrics port",
                subjects=["metrics_port"],
            ) from error
        self.address = f"{host}:{self._http.server_port}"


class _State(Collector):
    """What is true at the moment of the scrape."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        info = self._worker.info()
        build = GaugeMetricFamily(
            "weightsync_build_info", "Versions, as labels.", labels=["version", "engine"]
        )
        build.add_metric([info.server_version, f"{info.engine} {info.engine_version}"], 1)
        yield build
        yield GaugeMetricFamily(
            "weightsync_staging_bytes",
            "Bytes that sessions hold in the staging arena.",
            self._worker.staging_bytes,
        )
        yield GaugeMetricFamily(
            "weightsync_staging_limit_bytes",
            "Bytes that sessions may hold in the staging arena.",
            info.limits.max_arena_bytes,
        )
        yield GaugeMetricFamily(
            "weightsync_open_streams",
            "UpdateWeights streams that are open.",
            self._worker.open_streams,
        )
        versions = GaugeMetricFamily(
            "weightsync_weight_version_info",
            "What a target holds, as a label; absent while it holds no version.",
            labels=["target", "weight_version"],
        )
        committed = GaugeMetricFamily(
            "weightsync_last_commit_timestamp_seconds",
            "Unix time of the last commit; absent before the first.",
            labels=["target"],
        )
        quarantined = GaugeMetricFamily(
            "weightsync_quarantined", "1 while a target may not serve.", labels=["target"]
        )
        for status in info.targets:
            target = str(status.target)
            if status.weight_version:
                versions.add_metric([target, status.weight_version], 1)
            if status.last_commit_time:
                committed.add_metric([target], status.last_commit_time)
            quarantined.add_metric([target], status.state is TargetState.QUARANTINED)
        reloaded = GaugeMetricFamily(
            "weightsync_reloaded_tensors",
            "Tensors with which the engine computes while it loads its layers from them.",
            labels=["target"],
        )
        for loaded, count in self._worker.num_reloaded.items():
            reloaded.add_metric([str(loaded)], count)
        yield versions
        yield committed
        yield quarantined
        yield reloaded
