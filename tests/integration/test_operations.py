"""What operators see: health, reflection, metrics, logs."""

from __future__ import annotations

import io
import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import Start
from tests.integration.raw import DRAFT, VERIFIER, RawTrainer, all_bits, noise, told
from weightsync.core.errors import CommitFailedError, IncompleteError
from weightsync.core.trace import Trace
from weightsync.server.health import MAX_WATCHERS, SERVICES
from weightsync.server.reflection import MAX_STREAMS
from weightsync.server.server import Server
from weightsync.testing.models import Tiny
from weightsync.v1 import types_pb2, weight_sync_pb2

Models = tuple[Tiny, Tiny]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def health(trainer: RawTrainer) -> Any:
    """Return a stub of the health service."""
    return health_pb2_grpc.HealthStub(trainer.channel)


def service(name: str) -> health_pb2.HealthCheckRequest:
    """Return a request for a service's health."""
    return health_pb2.HealthCheckRequest(service=name)


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_worker_is_healthy(trainer: RawTrainer, name: str) -> None:
    """The process and both services are SERVING, under the contract's full names."""
    assert health(trainer).Check(service(name), timeout=60).status == SERVING
    full_names = {"weightsync.v1.WeightSync", "weightsync.v1.EngineControl", ""}
    assert full_names == SERVICES


def test_an_unknown_service_is_not_found(trainer: RawTrainer) -> None:
    """Check says NOT_FOUND, and Watch SERVICE_UNKNOWN, as the health protocol has it."""
    with pytest.raises(grpc.RpcError) as caught:
        health(trainer).Check(service("nobody"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health(trainer).Watch(service("nobody"), timeout=60)
    assert next(watch).status == SERVICE_UNKNOWN
    watch.cancel()


def test_a_draining_worker_is_not_healthy(server: Server, trainer: RawTrainer) -> None:
    """Watchers hear that the worker stops, while it still lets open sessions finish."""
    watch = health(trainer).Watch(service(""), timeout=60)
    assert next(watch).status == SERVING
    session = trainer.start(VERIFIER)
    server.worker.drain()
    assert next(watch).status == NOT_SERVING
    assert health(trainer).Check(service(""), timeout=60).status == NOT_SERVING
    assert trainer.abort(session).state == types_pb2.SESSION_STATE_ABORTED
    server.stop(0.0)
    assert list(watch) == []


def test_a_quarantined_target_shows(start: Start, models: Models) -> None:
    """A dropped IN_PLACE session makes the worker unhealthy and a FULL one heals it."""
    server = start(*models, metrics_port=0)
    with RawTrainer(server.address) as trainer:
        watch = health(trainer).Watch(service("weightsync.v1.WeightSync"), timeout=60)
        assert next(watch).status == SERVING
        session = trainer.start(VERIFIER, mode=types_pb2.UPDATE_MODE_IN_PLACE)
        trainer.push(session, VERIFIER, {"fc.weight": torch.ones(4, 4)})
        trainer.abort(session)
        assert next(watch).status == NOT_SERVING
        assert metrics(server)["weightsync_quarantined", ("verifier",)] == 1
        session = trainer.start(VERIFIER)
        trainer.push(session, VERIFIER, noise(models[0]))
        trainer.finish(session)
        assert next(watch).status == SERVING
        assert metrics(server)["weightsync_quarantined", ("verifier",)] == 0
        watch.cancel()


def test_health_watchers_are_bounded(trainer: RawTrainer) -> None:
    """Watchers beyond the limit are refused, and checks answer all the same."""
    watchers = [health(trainer).Watch(service(""), timeout=60) for _ in range(MAX_WATCHERS)]
    for watch in watchers:
        next(watch)
    with pytest.raises(grpc.RpcError) as caught:
        next(health(trainer).Watch(service(""), timeout=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert health(trainer).Check(service(""), timeout=60).status == SERVING
    for watch in watchers:
        watch.cancel()


def test_services_describe_themselves(trainer: RawTrainer) -> None:
    """A tool that knows nothing finds the services and their messages by reflection."""
    database = ProtoReflectionDescriptorDatabase(trainer.channel)
    assert {"weightsync.v1.WeightSync", "weightsync.v1.EngineControl", "grpc.health.v1.Health"} <= {
        *database.get_services()
    }
    pool = DescriptorPool(database)
    found = pool.FindServiceByName("weightsync.v1.WeightSync")
    ours = weight_sync_pb2.DESCRIPTOR.services_by_name["WeightSync"]
    assert [m.name for m in found.methods] == [m.name for m in ours.methods]


def test_reflection_can_be_switched_off(start: Start, models: Models) -> None:
    """Who does not want to be described says so."""
    with RawTrainer(start(*models, reflection=False).address) as trainer:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(trainer.channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter([]), timeout=60))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_other_hosts_get_no_description(start: Start, models: Models) -> None:
    """On an address that others can reach, reflection is off unless it is asked for."""
    server = start(*models, address="0.0.0.0:0", allow_insecure=True)
    port = server.address.rpartition(":")[2]
    with RawTrainer(f"127.0.0.1:{port}") as trainer:
        assert trainer.worker().targets
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(trainer.channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter([]), timeout=60))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_streams_are_bounded(trainer: RawTrainer) -> None:
    """Idle reflection streams take no more than their few threads."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(trainer.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    done = threading.Event()
    streams = []
    for _ in range(MAX_STREAMS):
        stream = stub.ServerReflectionInfo(_once_then_idle(ask, done), timeout=60)
        next(stream)
        streams.append(stream)
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.ServerReflectionInfo(_once_then_idle(ask, done), timeout=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    done.set()
    assert [list(stream) for stream in streams] == [[]] * MAX_STREAMS


def _once_then_idle(
    request: reflection_pb2.ServerReflectionRequest, done: threading.Event
) -> Iterator[reflection_pb2.ServerReflectionRequest]:
    yield request
    done.wait(60)


def metrics(server: Server) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return what /metrics shows, by name and label values in the order of the labels' names."""
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=60) as page:
        text = page.read().decode()
    return {
        (sample.name, tuple(v for _, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_what_happened(start: Start, models: Models) -> None:
    """Sessions, bytes, chunks, times and share groups are counted, by target and outcome."""
    server = start(*models, metrics_port=0)
    with RawTrainer(server.address) as trainer:
        new = noise(models[0])
        session = trainer.start(VERIFIER)
        trainer.push(session, VERIFIER, new)
        busy = metrics(server)
        assert busy["weightsync_staging_bytes", ()] >= sum(t.nbytes for t in new.values())
        committed = trainer.finish(session).targets[0].last_commit_time.ToSeconds()
        trainer.abort(trainer.start(VERIFIER, DRAFT))
    seen = metrics(server)
    expected = {
        ("weightsync_sessions_total", ("committed", "verifier")): 1,
        ("weightsync_sessions_total", ("aborted", "verifier")): 1,
        ("weightsync_sessions_total", ("aborted", "draft")): 1,
        ("weightsync_received_bytes_total", ()): sum(t.nbytes for t in new.values()),
        ("weightsync_received_chunks_total", ()): len(new),
        ("weightsync_sessions_total", ("expired", "draft")): 0,
        ("weightsync_receive_duration_seconds_count", ()): 1,
        ("weightsync_prepare_duration_seconds_count", ()): 1,
        ("weightsync_apply_duration_seconds_count", ()): 1,
        ("weightsync_engine_pause_seconds_count", ()): 1,
        ("weightsync_share_groups_checked_total", ("shared",)): 2,
        ("weightsync_share_groups_checked_total", ("broken",)): 0,
        ("weightsync_draft_commits_behind", ()): 1,
        ("weightsync_weight_version_info", ("verifier", "v1")): 1,
        ("weightsync_staging_bytes", ()): 0,
        ("weightsync_staging_limit_bytes", ()): server.worker.limits.max_arena_bytes,
        ("weightsync_open_streams", ()): 0,
        ("weightsync_quarantined", ("verifier",)): 0,
        ("weightsync_quarantined", ("draft",)): 0,
    }
    assert {key: seen.get(key) for key in expected} == expected
    stamp = seen["weightsync_last_commit_timestamp_seconds", ("verifier",)]
    assert int(stamp) == committed
    assert ("weightsync_last_commit_timestamp_seconds", ("draft",)) not in seen
    assert [key for key in seen if key[0] == "weightsync_weight_version_info"] == [
        ("weightsync_weight_version_info", ("verifier", "v1"))
    ]
    assert sum(name == "weightsync_build_info" for name, _ in seen) == 1


def test_metrics_stop_with_the_server(start: Start, models: Models) -> None:
    """The port of /metrics is free again after the stop, and each server has its own numbers."""
    first = start(*models, metrics_port=0)
    address = first.metrics_address
    assert address is not None
    first.stop(0.0)
    assert first.metrics_address is None
    second = start(*models, metrics_port=int(address.rpartition(":")[2]))
    assert second.metrics_address == address
    assert metrics(second)["weightsync_received_chunks_total", ()] == 0


def test_logs_tell_the_sessions_story(
    server: Server, trainer: RawTrainer, models: Models, log: io.StringIO
) -> None:
    """Each step of a session is in the log under its id, and no byte of a weight is."""
    session = trainer.start(VERIFIER)
    with pytest.raises(IncompleteError), told():
        trainer.finish(session)
    trainer.push(session, VERIFIER, noise(models[0]))
    trainer.finish(session)
    server.stop(0.0)
    entries = [json.loads(line) for line in log.getvalue().splitlines()]
    story = [entry["event"] for entry in entries if entry.get("session_id") == session]
    assert story[0] == "session.started"
    assert {"prepare.failed", "prepare.completed", "commit.completed"} <= set(story)
    assert story[-1] == "session.ended"
    refused = next(entry for entry in entries if entry["event"] == "call.refused")
    assert (refused["rpc"], refused["reason"]) == ("FinishWeightUpdate", "INCOMPLETE")
    assert entries[0]["event"] == "server.started"
    assert entries[-1]["event"] == "server.stopped"
    assert len(log.getvalue()) < 20_000


def test_every_line_about_a_session_names_it(
    start: Start, models: Models, log: io.StringIO
) -> None:
    """From a refused call to a quarantine and its end, no line leaves open whose it is."""

    def cut(name: str, _facts: dict[str, object]) -> None:
        if name == "commit.parameter":
            models[1].head.weight = torch.nn.Parameter(models[1].head.weight.detach().clone())

    server = start(*models, trace=Trace(cut))
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        with pytest.raises(IncompleteError), told():
            trainer.finish(session)
        trainer.push(session, VERIFIER, noise(models[0]))
        with pytest.raises(CommitFailedError), told():
            trainer.finish(session)
    server.stop(0.0)
    entries = [json.loads(line) for line in log.getvalue().splitlines()]
    named = [entry["event"] for entry in entries if entry.get("session_id") == session]
    assert named == [e["event"] for e in entries if not e["event"].startswith("server.")]
    assert {"call.refused", "share.checked", "rollback.failed", "quarantine"} <= set(named)


def test_an_expired_session_is_logged(start: Start, models: Models, log: io.StringIO) -> None:
    """A lease that runs out is told with the session's id and the old weights serve on."""
    before = all_bits(models[0])
    server = start(*models)
    watch = weight_sync_pb2.WatchWorkerRequest()
    with RawTrainer(server.address) as trainer:
        events = trainer.stub.WatchWorker(watch, timeout=60)
        next(events)
        session = trainer.start(VERIFIER, lease={"nanos": 100_000_000})
        kinds = [next(events).kind for _ in range(2)]
        assert kinds[1] == weight_sync_pb2.WatchWorkerResponse.KIND_EXPIRED
        events.cancel()
    server.stop(0.0)
    ended = [json.loads(line) for line in log.getvalue().splitlines() if "session.ended" in line]
    assert [(e["session_id"], e["outcome"]) for e in ended] == [(session, "expired")]
    assert all_bits(models[0]) == before
