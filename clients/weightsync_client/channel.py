"""Channels to a worker: options that fit what a worker's server allows."""

from __future__ import annotations

import ipaddress
import itertools
import json
from typing import TypeAlias
from urllib.parse import quote

import grpc

from weightsync.core.errors import InvalidRequestError
from weightsync.v1 import engine_control_pb2, weight_sync_pb2
from weightsync_client.bearer import TokenInterceptor
from weightsync_client.credentials import Credentials, read
from weightsync_client.forks import process

Options: TypeAlias = list[tuple[str, str | int]]

_UNIX = "unix:"
_MAX_ANSWER_BYTES = 64 << 20
_numbers = itertools.count()


def open_channel(address: str, credentials: Credentials | None = None) -> grpc.Channel:
    """Open a channel with a connection of its own; it connects at the first call.

    Args:
        address: `HOST:PORT`, or `unix:///PATH` with the path as it is.
        credentials: Certificates and token; None: plain text, and no token.

    Raises:
        InvalidRequestError: the address has neither form, a file can't be read, or others could
            read the token on its way.
        UnsupportedError: this process was forked from one that had connections.
    """
    process.connect()
    credentials = credentials or Credentials()
    target, options = _target(address), _options(address)
    if credentials.has_tls and not address.startswith(_UNIX):
        if credentials.server_name:
            options.append(("grpc.ssl_target_name_override", credentials.server_name))
        channel = grpc.secure_channel(target, _for_tls(credentials), options)
    elif credentials.has_token and not is_local(address):
        raise InvalidRequestError(
            f"without TLS everybody on the way to {address} could read the token; give the file"
            " with those who sign the worker's certificate (Credentials(ca=...), --tls-ca)",
            subjects=["ca"],
        )
    else:
        channel = grpc.insecure_channel(target, options)
    if credentials.has_token:
        channel = grpc.intercept_channel(channel, TokenInterceptor(credentials))
    return channel


def _for_tls(credentials: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=read(credentials.ca),
        private_key=read(credentials.key),
        certificate_chain=read(credentials.certificate),
    )


def _target(address: str) -> str:
    if address.startswith(_UNIX):
        return _UNIX + quote(address.removeprefix(_UNIX).removeprefix("//"))
    host, separator, port = address.rpartition(":")
    if not host or not separator or not port.isdecimal():
        raise InvalidRequestError(
            f"{address!r} is no address: write HOST:PORT or unix:///PATH", subjects=["address"]
        )
    return address


def _options(address: str) -> Options:
    options: Options = [
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also how long a connection may take to begin: with TLS, far away, or on a busy host.
        ("grpc.min_reconnect_backoff_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.service_config", _service_config()),
        # Channels with equal options would share one connection.
        ("weightsync.channel", next(_numbers)),
    ]
    if is_local(address):
        # A proxy of the environment can't reach what only this host can.
        options.append(("grpc.enable_http_proxy", 0))
    if address.startswith(_UNIX):
        # Otherwise the coded path is sent as authority, which strict servers refuse.
        options.append(("grpc.default_authority", "localhost"))
    return options


def is_local(address: str) -> bool:
    """Tell whether only this host can reach an address."""
    if address.startswith(_UNIX):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _service_config() -> str:
    """Return the retries of unary calls, all of which are idempotent."""
    services = (
        weight_sync_pb2.DESCRIPTOR.services_by_name["WeightSync"],
        engine_control_pb2.DESCRIPTOR.services_by_name["EngineControl"],
    )
    names = [
        {"service": service.full_name, "method": method.name}
        for service in services
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    ]
    retry = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": retry}]})
