"""Server reflection, for tools like grpcurl."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from weightsync.core.admission import Admission
from weightsync.core.errors import TooManyStreamsError
from weightsync.v1 import engine_control_pb2, weight_sync_pb2

MAX_STREAMS = 4

SERVICES = (
    weight_sync_pb2.DESCRIPTOR.services_by_name["WeightSync"].full_name,
    engine_control_pb2.DESCRIPTOR.services_by_name["EngineControl"].full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    reflection.SERVICE_NAME,
)


class Reflection:
    """Describes the services, to a few clients at once."""

    def __init__(self) -> None:
        """Describe all services of a worker."""
        self._answers = reflection.ReflectionServicer(SERVICES)
        self._streams = Admission("reflection streams", MAX_STREAMS)

    def ServerReflectionInfo(  # noqa: N802
        self,
        request_iterator: Iterator[reflection_pb2.ServerReflectionRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[reflection_pb2.ServerReflectionResponse]:
        """Answer questions one after the other."""
        try:
            with self._streams:
                yield from self._answers.ServerReflectionInfo(request_iterator, context)
        except TooManyStreamsError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))


def add_reflection(server: grpc.Server) -> None:
    """Add the service to a server."""
    register = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    register(Reflection(), server)  # type: ignore[no-untyped-call]
