"""Messages of any kind, right in form and wild in content, and bytes that are none."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from weightsync.v1 import engine_control_pb2, weight_sync_pb2

SERVICES = (
    weight_sync_pb2.DESCRIPTOR.services_by_name["WeightSync"],
    engine_control_pb2.DESCRIPTOR.services_by_name["EngineControl"],
)
RPCS: list[MethodDescriptor] = [method for service in SERVICES for method in service.methods]

SESSION = "an open session"
"""Stands in generated messages for the id of a session that is open."""

_WORDS = ["", SESSION, "fc.weight", "embed.weight", "fc.weight\0", "é" * 700, "*" * 300, "0", "-1"]
_DEPTH = 4
_MANY = 3

_NUMBERS: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: [0, 1, -1, 2**31 - 1, -(2**31)],
    FieldDescriptor.CPPTYPE_INT64: [0, 1, -1, 2**63 - 1, -(2**63)],
    FieldDescriptor.CPPTYPE_UINT32: [0, 1, 2, 2**32 - 1],
    FieldDescriptor.CPPTYPE_UINT64: [0, 1, 4, 16, 64, 2**32, 2**63, 2**64 - 1],
    FieldDescriptor.CPPTYPE_DOUBLE: [0.0, -1.0, float("inf"), float("nan")],
    FieldDescriptor.CPPTYPE_FLOAT: [0.0, -1.0, float("inf"), float("nan")],
    FieldDescriptor.CPPTYPE_BOOL: [False, True],
    FieldDescriptor.CPPTYPE_ENUM: [0, 1, 2, 3, 6, 99, -1],
}


def path_of(method: MethodDescriptor) -> str:
    """Return what a call of an rpc is sent to."""
    return f"/{method.containing_service.full_name}/{method.name}"


def messages(kind: type[Message], depth: int = _DEPTH) -> st.SearchStrategy[Message]:
    """Generate messages of a kind: each field left out, ordinary, or at an end of its range."""
    fields = {f.name: _values(f, depth) for f in kind.DESCRIPTOR.fields}
    chosen: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries({}, optional=fields)
    return chosen.map(lambda values: kind(**values))


def raw(kind: type[Message], session_id: str) -> st.SearchStrategy[bytes]:
    """Generate what a hostile peer may send in place of a message of a kind."""
    whole = messages(kind).map(
        lambda message: message.SerializeToString().replace(
            _field(SESSION.encode()), _field(session_id.encode())
        )
    )
    cut = st.tuples(whole, st.integers(0, 40)).map(lambda pair: pair[0][: -pair[1] or None])
    return st.one_of(whole, cut, st.binary(max_size=64))


def _field(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def _values(field: Any, depth: int) -> st.SearchStrategy[Any]:
    one: st.SearchStrategy[Any]
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if not depth:
            return st.nothing()
        one = messages(GetMessageClass(field.message_type), depth - 1)
    elif field.type == FieldDescriptor.TYPE_STRING:
        one = st.sampled_from(_WORDS)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = st.sampled_from([b"", bytes(16), bytes(64), b"\xff" * 64])
    else:
        one = st.sampled_from(_NUMBERS[field.cpp_type])
    return st.lists(one, max_size=_MANY) if field.is_repeated else one
