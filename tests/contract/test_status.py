from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import (
    BadRequest,
    ErrorInfo,
    PreconditionFailure,
    ResourceInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from weightsync.core.errors import (
    EngineUnavailableError,
    IncompleteError,
    InvalidRequestError,
    Reason,
    SharedWeightError,
    TargetBusyError,
    UnknownSessionError,
    UnknownTensorError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.v1 import errors_pb2
from weightsync.wire.status import CODES, error_of, error_of_code, status_of

M = TypeVar("M", bound=Message)

ROOT = Path(__file__).parents[2]
CLASSES = [WeightSyncError.class_for(reason) for reason in Reason]

texts = st.text(st.characters(codec="utf-8"), max_size=40)


def test_every_reason_has_a_code() -> None:
    """The table from reason to status code has each reason once, and no code stands for success."""
    assert set(CODES) == set(Reason)
    assert set(CODES.values()) <= set(Code.values()) - {Code.OK, Code.UNKNOWN}


def test_reasons_are_those_of_the_contract() -> None:
    """Names and numbers of the reasons are the protobuf enum's."""
    contract = dict(errors_pb2.Reason.items())
    assert contract.pop("REASON_UNSPECIFIED") == 0
    assert contract == {f"REASON_{reason.name}": reason.value for reason in Reason}


def test_every_reason_has_a_class_of_its_own() -> None:
    """Each reason is raised as one class, by the worker and by the client."""
    assert [kind.reason for kind in CLASSES] == list(Reason)


def test_the_contract_names_the_code_of_each_reason() -> None:
    """The comment beside each reason in the protobuf file begins with its status code."""
    text = (ROOT / "protos/weightsync/v1/errors.proto").read_text()
    # The first word of the comment above each value.
    told = re.findall(r"// ([A-Z_]+)\.[^=]*?REASON_([A-Z_]+) =", text)
    assert [(name, code) for code, name in told] == [
        (reason.name, Code.Name(CODES[reason])) for reason in Reason
    ]


@given(
    kind=st.sampled_from(CLASSES),
    text=texts,
    subjects=st.lists(texts, max_size=10),
    retry_after=st.none() | st.integers(0, 10**6).map(lambda ms: ms / 1000),
    metadata=st.dictionaries(texts, texts, max_size=5),
)
def test_an_error_survives_the_wire(
    kind: type[WeightSyncError],
    text: str,
    subjects: list[str],
    retry_after: float | None,
    metadata: dict[str, str],
) -> None:
    """The client raises the class, text and facts that the worker raised."""
    error = kind(text, subjects=subjects, retry_after=retry_after)
    error.metadata = metadata
    status = Status.FromString(status_of(error).SerializeToString())
    assert status.code == CODES[kind.reason]
    back = error_of(status)
    assert type(back) is kind
    assert str(back) == text
    assert back.subjects == tuple(subjects)
    assert back.retry_after == retry_after
    assert back.metadata == metadata


def details(error: WeightSyncError, kind: type[M]) -> list[M]:
    """Return the details of one kind in an error's status."""
    found = []
    for detail in status_of(error).details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_carries_an_error_info(kind: type[WeightSyncError]) -> None:
    """A program in any language finds the reason in the ErrorInfo of our domain."""
    (info,) = details(kind("text", holder="me"), ErrorInfo)
    assert (info.reason, info.domain) == (kind.reason.name, "weightsync.v1")
    assert info.metadata == {"holder": "me"}


def test_standard_details_say_what_is_concerned() -> None:
    """Fields, missing tensors, shared tensors, resources and delays use google.rpc's own words."""
    (bad,) = details(InvalidRequestError("x", subjects=["scope"]), BadRequest)
    assert bad.field_violations[0].field == "scope"
    (missing,) = details(IncompleteError("x", subjects=["a", "b"]), PreconditionFailure)
    assert [(v.type, v.subject) for v in missing.violations] == [("MISSING", "a"), ("MISSING", "b")]
    (shared,) = details(SharedWeightError("x", subjects=["embed"]), PreconditionFailure)
    assert (shared.violations[0].type, shared.violations[0].subject) == ("SHARED_WEIGHT", "embed")
    (session,) = details(UnknownSessionError("x", subjects=["s1"]), ResourceInfo)
    assert (session.resource_type, session.resource_name) == ("session", "s1")
    (tensor,) = details(UnknownTensorError("x", subjects=["a"]), ResourceInfo)
    assert (tensor.resource_type, tensor.resource_name) == ("tensor", "a")
    (retry,) = details(TargetBusyError("x", retry_after=1.5), RetryInfo)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 500_000_000)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("letter", ["x", "é", "\N{GRINNING FACE}", "\ud800"])
def test_details_fit_into_trailers(kind: type[WeightSyncError], letter: str) -> None:
    """However long the texts are, a status stays below the 8 KiB that gRPC takes in trailers."""
    error = kind(f"begin{letter * 5000}end", subjects=[letter * 5000] * 500)
    error.metadata = {f"{letter * 5000}{index}": letter * 5000 for index in range(50)}
    status = status_of(error)
    assert status.message.startswith("begin")
    assert status.message.endswith("end")
    percent_coded = 3 * len(status.message.encode())
    in_base64 = len(status.SerializeToString()) * 4 / 3
    assert percent_coded + in_base64 < 8000


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.UNAVAILABLE, EngineUnavailableError),
        (Code.UNIMPLEMENTED, UnsupportedError),
        (Code.INVALID_ARGUMENT, InvalidRequestError),
        (Code.DEADLINE_EXCEEDED, WeightSyncError),
        (Code.CANCELLED, WeightSyncError),
        (999, WeightSyncError),
    ],
)
def test_a_status_without_details_is_still_an_error(code: int, kind: type[WeightSyncError]) -> None:
    """What gRPC itself says, such as a lost connection, becomes the nearest class."""
    for error in (
        error_of_code(code, "connection refused"),
        error_of(Status(code=code, message="connection refused")),
    ):
        assert type(error) is kind
        assert "connection refused" in str(error)
        assert error.metadata["code"] == (Code.Name(code) if code < 100 else "999")


def test_details_of_others_and_of_newer_workers_are_no_trouble() -> None:
    """An ErrorInfo of another domain, an unknown reason or an odd key does not break the client."""
    status = Status(code=Code.UNAVAILABLE, message="gone")
    status.details.add().Pack(ErrorInfo(reason="INCOMPLETE", domain="example.com"))
    assert type(error_of(status)) is EngineUnavailableError
    status = Status(code=Code.UNIMPLEMENTED, message="new")
    status.details.add().Pack(ErrorInfo(reason="FROM_THE_FUTURE", domain="weightsync.v1"))
    assert type(error_of(status)) is UnsupportedError
    status = Status(code=Code.ABORTED, message="busy")
    odd = {"subjects": "a", "message": "b", "retry_after": "c"}
    status.details.add().Pack(ErrorInfo(reason="TARGET_BUSY", domain="weightsync.v1", metadata=odd))
    status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
    error = error_of(status)
    assert type(error) is TargetBusyError
    assert error.metadata == odd
