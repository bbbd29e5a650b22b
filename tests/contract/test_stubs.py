"""The generated stubs work on every allowed version of protobuf and grpcio, old and new."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor

import weightsync.v1
from weightsync.v1 import engine_control_pb2, weight_sync_pb2

STUBS = sorted(module.name for module in pkgutil.iter_modules(weightsync.v1.__path__))
SERVICES = [
    service
    for file in (engine_control_pb2.DESCRIPTOR, weight_sync_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
]


@pytest.mark.parametrize("name", STUBS)
def test_each_stub_imports_alone_without_a_warning(name: str) -> None:
    """Each stub, imported first and alone, raises no warning about the versions beside it."""
    program = f"import weightsync.v1.{name}"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: str(service.name))
def test_each_rpc_can_be_called_and_overridden(service: ServiceDescriptor) -> None:
    """Each rpc of each service is a method of its client stub and of its servicer."""
    stem = service.file.name.removesuffix(".proto").replace("/", ".")
    stubs = importlib.import_module(f"{stem}_pb2_grpc")
    servicer = getattr(stubs, f"{service.name}Servicer")
    with grpc.insecure_channel("localhost:1") as channel:
        stub = getattr(stubs, f"{service.name}Stub")(channel)
    for method in service.methods:
        assert callable(getattr(stub, method.name))
        assert callable(getattr(servicer, method.name))
