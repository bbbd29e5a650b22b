from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.strategies import (
    any_regions,
    names,
    regions,
    shapes,
    spans,
    target_sets,
    texts,
    times,
    uint32,
    uint64,
)
from weightsync.core import types, views
from weightsync.core.dtypes import DType
from weightsync.core.errors import InvalidRequestError, MalformedPayloadError, UnsupportedError
from weightsync.core.types import Limits, Scope, Target, Transport, UpdateRequest
from weightsync.v1 import types_pb2, weight_sync_pb2
from weightsync.v1.weight_sync_pb2 import StartWeightUpdateRequest
from weightsync.wire import answers, convert, requests, workers

LIMITS = Limits()

sessions = st.builds(
    views.SessionInfo,
    session_id=texts,
    targets=target_sets,
    weight_version=texts,
    holder=texts,
    create_time=times,
    expire_time=times,
    received_bytes=uint64,
    missing_bytes=uint64,
    end_reason=texts,
)
statuses = st.builds(
    views.TargetStatus,
    weight_version=texts,
    num_tensors=uint64,
    num_bytes=uint64,
    num_unwritten=uint64,
    num_commits=uint64,
    session_id=texts,
    quarantine_reason=texts,
    last_commit_time=times,
)
limits = st.builds(
    Limits,
    max_message_bytes=uint64,
    max_name_bytes=uint64,
    max_segments=uint64,
    max_streams=uint64,
    max_arena_bytes=uint64,
    max_lease=spans,
    max_dims=uint64,
    max_readers=uint64,
    max_watchers=uint64,
    max_sessions=uint64,
    max_names=uint64,
    # These do not concern a caller, and are not told.
    **{
        name: st.just(getattr(LIMITS, name))
        for name in (
            "default_lease",
            "gate_timeout",
            "drain_timeout",
        )
    },
)
coordinates = st.builds(
    types.Coordinates, **dict.fromkeys(types.Coordinates.__dataclass_fields__, uint32)
)
many_texts = st.lists(texts, max_size=4).map(tuple)
many_regions = st.lists(any_regions, max_size=3).map(tuple)

ANSWERS: dict[str, tuple[st.SearchStrategy[Any], Callable[..., Message], Callable[..., Any]]] = {
    "session": (sessions, answers.session_to_proto, answers.session_from_proto),
    "target status": (
        statuses,
        answers.target_status_to_proto,
        answers.target_status_from_proto,
    ),
    "tensor": (
        shapes.flatmap(
            lambda shape: st.builds(
                views.TensorInfo,
                name=names,
                shape=st.just(shape),
                regions=st.lists(regions(shape), max_size=3).map(tuple),
                share_group=texts,
            )
        ),
        answers.tensor_info_to_proto,
        answers.tensor_info_from_proto,
    ),
    "missing tensor": (
        st.builds(views.MissingTensor, name=names, regions=many_regions, missing_bytes=uint64),
        answers.missing_to_proto,
        answers.missing_from_proto,
    ),
    "stream report": (
        st.builds(
            views.StreamReport,
            received_bytes=uint64,
            received_chunks=uint64,
            applied_tensors=uint64,
            ignored_names=many_texts,
            expire_time=times,
        ),
        answers.stream_report_to_proto,
        answers.stream_report_from_proto,
    ),
    "prepare report": (
        st.builds(views.PrepareReport, session=sessions, prepare_seconds=spans),
        answers.prepare_to_proto,
        answers.prepare_from_proto,
    ),
    "commit report": (
        st.builds(
            views.CommitReport,
            session=sessions,
            targets=st.lists(statuses, max_size=2).map(tuple),
            applied_tensors=uint64,
            applied_bytes=uint64,
            ignored_names=many_texts,
            receive_seconds=spans,
            prepare_seconds=spans,
            pause_seconds=spans,
            checked_share_groups=uint64,
        ),
        answers.commit_to_proto,
        answers.commit_from_proto,
    ),
    "digest": (
        st.builds(
            views.TensorDigest,
            name=names,
            region=any_regions,
            xxh3_128=st.binary(min_size=16, max_size=16),
            weight_version=texts,
        ),
        answers.digest_to_proto,
        answers.digest_from_proto,
    ),
    "event": (
        st.builds(
            views.Event,
            sequence=uint64,
            time=times,
            targets=target_sets,
            session_id=texts,
            weight_version=texts,
            cause=texts,
        ),
        answers.event_to_proto,
        answers.event_from_proto,
    ),
    "worker": (
        st.builds(
            views.WorkerInfo,
            instance_id=texts,
            engine=texts,
            engine_version=texts,
            server_version=texts,
            coordinates=coordinates,
            targets=st.lists(statuses, max_size=2).map(tuple),
            limits=limits,
            modes=st.lists(st.sampled_from(types.UpdateMode), unique=True).map(tuple),
            controls=many_texts,
        ),
        workers.worker_to_proto,
        workers.worker_from_proto,
    ),
    "request": (
        st.builds(
            UpdateRequest,
            targets=st.frozensets(st.sampled_from(Target), min_size=1),
            weight_version=names,
            request_id=texts,
            expected_base_versions=st.lists(
                st.tuples(st.sampled_from(Target), texts), max_size=2, unique_by=lambda v: v[0]
            ).map(tuple),
            lease=st.none() | spans.filter(bool),
            prepared_lease=st.none() | spans.filter(bool),
            transports=st.just((Transport.INLINE,)),
            ignore_names=many_texts,
            holder=texts,
        ),
        requests.update_request_to_proto,
        lambda message: requests.update_request_from_proto(message, LIMITS),
    ),
}

ENUMS: list[tuple[type[enum.Enum], Any, str]] = [
    (DType, types_pb2.DataType, "DATA_TYPE"),
    (types.Target, types_pb2.Target, "TARGET"),
    (types.Scope, types_pb2.Scope, "SCOPE"),
    (types.UpdateMode, types_pb2.UpdateMode, "UPDATE_MODE"),
    (types.SharedTensorPolicy, types_pb2.SharedTensorPolicy, "SHARED_TENSOR_POLICY"),
    (types.CastPolicy, types_pb2.CastPolicy, "CAST_POLICY"),
    (types.TargetState, types_pb2.TargetState, "TARGET_STATE"),
    (types.SessionState, types_pb2.SessionState, "SESSION_STATE"),
    (types.Transport, types_pb2.Transport, "TRANSPORT"),
    (types.Encoding, types_pb2.Encoding, "ENCODING"),
    (types.ChecksumType, types_pb2.ChecksumType, "CHECKSUM_TYPE"),
    (types.CacheReset, weight_sync_pb2.CacheReset, "CACHE_RESET"),
    (views.EventKind, weight_sync_pb2.WatchWorkerResponse.Kind, "KIND"),
]


@pytest.mark.parametrize(("kind", "contract", "prefix"), ENUMS, ids=str)
def test_enums_are_those_of_the_contract(
    kind: type[enum.Enum], contract: EnumTypeWrapper, prefix: str
) -> None:
    """B45: the core has each word of the contract, by the same name and number, and no other."""
    assert dict(contract.items()) == {
        f"{prefix}_UNSPECIFIED": 0,
        **{f"{prefix}_{word.name}": word.value for word in kind},
    }


@pytest.mark.parametrize("name", ANSWERS)
@given(data=st.data())
def test_values_survive_the_wire(name: str, data: st.DataObject) -> None:
    """What one side told, the other side knows, in every field."""
    values, to_proto, from_proto = ANSWERS[name]
    value = data.draw(values)
    message = to_proto(value)
    assert from_proto(type(message).FromString(message.SerializeToString())) == value


@given(seconds=st.floats(0, 2**31))
def test_times_keep_their_nanoseconds(seconds: float) -> None:
    """A time or span of any precision comes back to the nanosecond, in its canonical form."""
    stamp, span = convert.time_to_proto(seconds), convert.duration_to_proto(seconds)
    assert 0 <= stamp.nanos < 10**9
    assert 0 <= span.nanos < 10**9
    assert abs(convert.time_from_proto(stamp) - seconds) <= 1e-9
    assert abs(convert.duration_from_proto(span) - seconds) <= 1e-9


def test_a_target_without_a_commit_has_no_commit_time() -> None:
    """A time that never was is absent on the wire, not the year 1970."""
    status = views.TargetStatus(Target.DRAFT, types.TargetState.READY, "", 0, 0, 0, 0)
    assert not answers.target_status_to_proto(status).HasField("last_commit_time")


def test_a_worker_tells_all_that_it_can() -> None:
    """The capabilities list each element type, checksum, encoding and transport."""
    worker = views.WorkerInfo("", "", "", "", types.Coordinates(), (), LIMITS, (), ("Sleep",))
    told = workers.worker_to_proto(worker).capabilities
    assert len(told.dtypes) == len(DType)
    assert len(told.checksums) == len(types.ChecksumType)
    assert list(told.encodings) == [types_pb2.ENCODING_DENSE]
    assert list(told.transports) == [types_pb2.TRANSPORT_INLINE]
    assert list(told.controls) == ["Sleep"]


def test_modes_of_newer_workers_are_left_out() -> None:
    """A client ignores an ability that it does not know."""
    message = weight_sync_pb2.GetWorkerResponse()
    message.capabilities.modes.extend([types_pb2.UPDATE_MODE_STAGED, 9])  # type: ignore[list-item]
    assert workers.worker_from_proto(message).modes == (types.UpdateMode.STAGED,)


@pytest.mark.parametrize(
    ("from_proto", "message", "field"),
    [
        (answers.session_from_proto, types_pb2.Session(), "session.state"),
        (answers.target_status_from_proto, types_pb2.TargetStatus(), "target"),
        (answers.tensor_info_from_proto, types_pb2.TensorInfo(), "target"),
        (answers.event_from_proto, weight_sync_pb2.WatchWorkerResponse(), "kind"),
    ],
)
def test_an_answer_with_an_unset_word_is_refused(
    from_proto: Callable[..., object], message: Message, field: str
) -> None:
    """A client does not guess what a worker left out."""
    with pytest.raises(InvalidRequestError) as caught:
        from_proto(message)
    assert caught.value.subjects == (field,)


def start(**changes: Any) -> StartWeightUpdateRequest:
    """Build a small valid request, with changes."""
    fields: dict[str, Any] = {
        "targets": [types_pb2.TARGET_DRAFT],
        "scope": types_pb2.SCOPE_FULL,
        "weight_version": "v2",
    }
    return StartWeightUpdateRequest(**{**fields, **changes})


def test_the_shortest_request_has_the_defaults_of_the_contract() -> None:
    """Fields that may be left out stand for staged, refusing, inline, with the worker's lease."""
    request = requests.update_request_from_proto(start(), LIMITS)
    assert request == UpdateRequest(frozenset({Target.DRAFT}), Scope.FULL, "v2")


LONG = "é" * 513


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"targets": []}, "targets"),
        ({"targets": [1, 0]}, "targets[1]"),
        ({"targets": [3]}, "targets[0]"),
        ({"scope": 0}, "scope"),
        ({"scope": 3}, "scope"),
        ({"weight_version": ""}, "weight_version"),
        ({"weight_version": LONG}, "weight_version"),
        ({"request_id": LONG}, "request_id"),
        ({"holder": LONG}, "holder"),
        ({"ignore_names": ["a", LONG]}, "ignore_names[1]"),
        ({"mode": 3}, "mode"),
        ({"mode": -1}, "mode"),
        ({"shared_tensors": 4}, "shared_tensors"),
        ({"cast": 3}, "cast"),
        ({"transports": [1, 0]}, "transports[1]"),
        (
            {"expected_base_versions": [{"weight_version": "v1"}]},
            "expected_base_versions[0].target",
        ),
        (
            {"expected_base_versions": [{"target": 1}, {"target": 1}]},
            "expected_base_versions[1].target",
        ),
        ({"lease": {}}, "lease"),
        ({"lease": {"seconds": -1}}, "lease"),
        ({"lease": {"nanos": -5}}, "lease"),
        ({"prepared_lease": {}}, "prepared_lease"),
        ({"ignore_names": ["a"] * (LIMITS.max_names + 1)}, "ignore_names"),
    ],
)
def test_a_bad_field_of_a_request_is_named(changes: dict[str, Any], field: str) -> None:
    """A missing, unknown or oversized field is refused by its path, before a session exists."""
    with pytest.raises(InvalidRequestError) as caught:
        requests.update_request_from_proto(start(**changes), LIMITS)
    assert caught.value.subjects == (field,)


def test_transports_that_only_newer_clients_know_are_passed_over() -> None:
    """A caller that offers something newer first gets what both know."""
    request = requests.update_request_from_proto(start(transports=[7, 1]), LIMITS)
    assert request.transports == (Transport.INLINE,)
    with pytest.raises(UnsupportedError, match="INLINE"):
        requests.update_request_from_proto(start(transports=[7]), LIMITS)


@pytest.mark.parametrize("lease", [0.0, -1.0, float("inf"), float("nan")])
def test_a_caller_cannot_ask_for_a_lease_that_is_none(lease: float) -> None:
    """A lease that is not a positive number is refused before it is sent."""
    request = UpdateRequest(frozenset({Target.DRAFT}), Scope.FULL, "v2", lease=lease)
    with pytest.raises(InvalidRequestError) as caught:
        requests.update_request_to_proto(request)
    assert caught.value.subjects == ("lease",)


@given(st.binary(max_size=100))
def test_random_requests_are_taken_or_refused(data: bytes) -> None:
    """Whatever arrives as a request, the answer is a request or an error of ours."""
    try:
        message = convert.parse_message(StartWeightUpdateRequest, data)
        requests.update_request_from_proto(message, LIMITS)
    except (InvalidRequestError, MalformedPayloadError, UnsupportedError):
        pass
