from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from weightsync_client import Fleet, push_model
from weightsync_client.tracing import session_spans

from tests.integration.conftest import Start
from tests.integration.process import run
from tests.integration.raw import FULL, VERIFIER, RawTrainer, noise
from weightsync.core.errors import CommitRolledBackError, IncompleteError
from weightsync.core.trace import Trace
from weightsync.testing.failpoints import Failpoint, raise_error
from weightsync.testing.models import Tiny, tiny_pair
from weightsync.v1 import weight_sync_pb2

Models = tuple[Tiny, Tiny]
Spans = dict[str, ReadableSpan]

TRAINER = """
import os
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from weightsync.core.trace import Trace
from weightsync.testing.models import tiny_pair
from weightsync_client import Fleet, push_model
from weightsync_client.tracing import session_spans

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
with (
    provider.get_tracer("training").start_as_current_span("step 7"),
    Fleet(os.environ["ADDRESSES"].split(), trace=Trace(session_spans(provider))) as fleet,
):
    push_model(fleet, *tiny_pair(seed=1), version="v1")
tell(spans=[json.loads(span.to_json()) for span in exporter.get_finished_spans()])
"""

UNTRACED = """
import sys
import weightsync
from weightsync.testing.models import tiny_pair
from weightsync_client import push_model

with weightsync.serve(*tiny_pair()) as server:
    push_model(server.address, *tiny_pair(seed=1), version="v1")
tell(imported=[name for name in sys.modules if name.startswith("opentelemetry")])
"""

NOT_INSTALLED = """
import sys
sys.modules["opentelemetry"] = None
import weightsync
from weightsync.core.errors import InvalidRequestError
from weightsync.testing.models import tiny_pair

try:
    weightsync.serve(*tiny_pair(), tracing=True)
except InvalidRequestError as error:
    tell(error=str(error))
"""


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Keep the spans of all workers in this process, whose tracer provider can be set once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def told(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    """The same, empty."""
    exporter.clear()
    return exporter


def by_name(exporter: InMemorySpanExporter, session_id: str | None = None) -> Spans:
    """Return the spans of a session by their names, without their common prefix."""
    return {
        span.name.removeprefix("weightsync."): span
        for span in exporter.get_finished_spans()
        if span.attributes and session_id in (None, span.attributes.get("weightsync.session_id"))
    }


def id_of(span: ReadableSpan) -> tuple[int, int]:
    """Return trace and span id."""
    assert span.context
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    """Return trace and span id of the parent."""
    return (span.parent.trace_id, span.parent.span_id) if span.parent else None


def ids(told: dict[str, Any]) -> tuple[int, int]:
    """Return trace and span id, as JSON has them."""
    return int(told["trace_id"], 16), int(told["span_id"], 16)


def test_a_trace_goes_from_the_trainer_to_all_workers(
    told: InMemorySpanExporter, start: Start, models: Models
) -> None:
    """A session and each phase is a span, and those of workers belong to the trainer's trace."""
    servers = [start(*models, tracing=True), start(*tiny_pair(), tracing=True)]
    spans = run(TRAINER, ADDRESSES=" ".join(server.address for server in servers))["spans"]
    by_id = {ids(span["context"]): span["name"] for span in spans}
    names = [span["name"].removeprefix("weightsync.") for span in spans]
    assert sorted(names) == sorted(
        [*("step 7", "session", "start", "push", "push", "settle", "prepare", "finish")]
        + 2 * ["worker.prepare", "worker.finish"]
    )
    (step,) = (span for span in spans if span["name"] == "step 7")
    assert {span["context"]["trace_id"] for span in spans} == {step["context"]["trace_id"]}
    parents = {
        span["name"].removeprefix("weightsync."): by_id[
            int(span["context"]["trace_id"], 16), int(span["parent_id"], 16)
        ].removeprefix("weightsync.")
        for span in spans
        if span is not step
    }
    assert parents == {
        "session": "step 7",
        "start": "session",
        "push": "session",
        "settle": "session",
        "prepare": "session",
        "worker.prepare": "prepare",
        "finish": "session",
        "worker.finish": "finish",
    }
    sessions = {
        str((span.attributes or {})["weightsync.session_id"]) for span in told.get_finished_spans()
    }
    assert len(sessions) == len(servers)
    for session_id in sessions:
        mine = by_name(told, session_id)
        assert set(mine) == {"session", "stream", "prepare", "commit"}
        parent = parent_of(mine["session"])
        assert parent
        assert by_id[parent] == "weightsync.start"
        assert (mine["session"].attributes or {})["weightsync.outcome"] == "committed"
        linked = {}
        for phase in ("stream", "prepare", "commit"):
            assert parent_of(mine[phase]) == id_of(mine["session"])
            (link,) = mine[phase].links
            linked[phase] = by_id[link.context.trace_id, link.context.span_id]
        assert linked == {
            "stream": "weightsync.settle",
            "prepare": "weightsync.worker.prepare",
            "commit": "weightsync.worker.finish",
        }


def test_bare_stubs_are_traced_too(
    told: InMemorySpanExporter, start: Start, models: Models
) -> None:
    """A caller that sends no context gets a trace of its own, with a session and its phases."""
    with RawTrainer(start(*models, tracing=True).address) as trainer:
        session = trainer.start(VERIFIER)
        trainer.push(session, VERIFIER, noise(models[0]))
        trainer.finish(session)
    spans = by_name(told, session)
    assert set(spans) == {"session", "stream", "prepare", "commit"}
    assert spans["session"].parent is None
    attributes = spans["session"].attributes or {}
    assert attributes["weightsync.weight_version"] == "v1"
    assert attributes["weightsync.targets"] == ("verifier",)
    assert not any(span.links for span in spans.values())
    pause = (spans["commit"].attributes or {})["weightsync.pause"]
    assert isinstance(pause, float)


@pytest.mark.parametrize("sent", ["", "00-x", "00-" + 32 * "0" + "-" + 16 * "0" + "-01", "9" * 999])
def test_a_context_that_is_none_is_ignored(
    told: InMemorySpanExporter, start: Start, models: Models, sent: str
) -> None:
    """A malformed `traceparent` fails nothing and begins a trace of its own."""
    with RawTrainer(start(*models, tracing=True).address) as trainer:
        request = weight_sync_pb2.StartWeightUpdateRequest(
            request_id="r", targets=[VERIFIER], scope=FULL, weight_version="v1"
        )
        metadata = (("traceparent", sent),)
        answer = trainer.stub.StartWeightUpdate(request, timeout=60, metadata=metadata)
        trainer.abort(answer.session.session_id)
    assert by_name(told)["session"].parent is None


def test_a_commit_that_is_taken_back_is_told(
    told: InMemorySpanExporter, start: Start, models: Models
) -> None:
    """What fails has the status ERROR and its exception, on both sides; rollback is in commit."""
    own, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(own))
    worker_trace = Trace(Failpoint("commit.parameter", raise_error, nth=2).hook)
    server = start(*models, trace=worker_trace, tracing=True)
    with (
        Fleet([server.address], trace=Trace(session_spans(provider))) as fleet,
        pytest.raises(CommitRolledBackError),
    ):
        push_model(fleet, *tiny_pair(seed=1), version="v1")
    mine, theirs = by_name(own), by_name(told)
    assert not mine["worker.finish"].status.is_ok
    assert (mine["session"].attributes or {})["weightsync.outcome"] == "aborted"
    assert {name for name, span in theirs.items() if not span.status.is_ok} == {"session", "commit"}
    assert parent_of(theirs["rollback"]) == id_of(theirs["commit"])
    (event,) = theirs["commit"].events
    assert event.name == "exception"
    assert "CommitRolledBackError" in str((event.attributes or {})["exception.type"])


def test_a_hook_that_refuses_a_phase_leaves_no_span_open(
    told: InMemorySpanExporter, start: Start, models: Models
) -> None:
    """A step that another hook stops at its start is a failed span, and the next one is whole."""
    server = start(*models, tracing=True)
    server.worker.trace.add(Failpoint("commit.started", raise_error).hook)
    with Fleet([server.address]) as fleet:
        session = fleet.update(version="v1")
        session.push(tiny_pair(seed=1)[0])
        with pytest.raises(Exception, match="failed inside the worker"):
            session.finish()
        session.abort()
        push_model(fleet, *tiny_pair(seed=1), version="v2")
    commits = [span for span in told.get_finished_spans() if span.name == "weightsync.commit"]
    assert [span.status.is_ok for span in commits] == [False, True]


def test_a_session_that_others_join_is_linked_with_their_traces(
    told: InMemorySpanExporter, start: Start, models: Models
) -> None:
    """Each process that fills a session has a trace; the worker's phases are linked with them."""
    own, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(own))
    server = start(*models, tracing=True)
    with Fleet([server.address]) as first, Fleet([server.address]) as second:
        session = first.update(version="v1")
        second.trace.add(session_spans(provider))
        with second.join(session.ticket) as joined:
            joined.push(tiny_pair(seed=1)[0])
        session.finish()
    mine, theirs = by_name(own), by_name(told)
    assert (mine["session"].attributes or {})["weightsync.outcome"] == "settled"
    (link,) = theirs["stream"].links
    # What was pushed is little, and leaves when it is settled.
    assert id_of(mine["settle"]) == (link.context.trace_id, link.context.span_id)
    assert parent_of(theirs["stream"]) == id_of(theirs["session"])


def test_a_refused_session_ends_its_span(told: InMemorySpanExporter, start: Start) -> None:
    """A start that the worker refuses, and a finish without all tensors, leave no span open."""
    own, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(own))
    server = start(tiny_pair()[0], tracing=True)
    with Fleet([server.address], trace=Trace(session_spans(provider))) as fleet:
        with pytest.raises(Exception, match="no draft"):
            fleet.update(version="v1", target="draft")
        with pytest.raises(IncompleteError), fleet.update(version="v1"):
            pass
    outcomes = [
        (span.attributes or {})["weightsync.outcome"]
        for span in own.get_finished_spans()
        if span.name == "weightsync.session"
    ]
    assert outcomes == ["refused", "aborted"]
    assert (by_name(told)["session"].attributes or {})["weightsync.outcome"] == "aborted"


def test_nothing_is_imported_for_those_who_do_not_ask() -> None:
    """Without tracing, a worker and a client do not even import OpenTelemetry."""
    assert run(UNTRACED) == {"imported": []}


def test_tracing_that_is_not_installed_is_refused() -> None:
    """Without OpenTelemetry, those who ask for tracing are told so, with the remedy."""
    assert "weightsync[otel]" in run(NOT_INSTALLED)["error"]
