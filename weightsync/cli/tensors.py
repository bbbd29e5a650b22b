"""`weightsync tensors`: what a worker needs, by name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Annotated

import typer
from weightsync_client.credentials import Credentials

from weightsync.cli.credentials import with_credentials
from weightsync.cli.options import At, Json, addresses
from weightsync.cli.options import target as target_named
from weightsync.cli.output import print_json, print_table, size

if TYPE_CHECKING:
    from weightsync.core.views import TensorInfo

COLUMNS = ("worker", "target", "name", "dtype", "shape", "size", "written", "reloaded", "shared")


@with_credentials
def tensors(
    worker: At,
    target: Annotated[
        str | None, typer.Option(help="verifier or draft; both if it is left out.")
    ] = None,
    name: Annotated[str, typer.Option(help="Pattern of names, as in a shell.")] = "*",
    json: Json = False,
    *,
    credentials: Credentials,
) -> None:
    """List the tensors of a worker: name, type, shape, whether a push has written it, ties.

    From reloaded ones the engine loads its layers again, since it computes with them. Tensors with
    the same mark in the last column are one storage.

    For example:

        weightsync tensors 127.0.0.1:50051 --target draft

        weightsync tensors 127.0.0.1:50051 --name '*.norm.weight' --json
    """
    from weightsync_client import connect

    targets = [target_named(target)] if target else []
    rows: list[tuple[str, TensorInfo]] = []
    for address in addresses(worker):
        with connect(address, credentials=credentials) as connection:
            found = connection.tensors(targets)
            rows += ((address, info) for info in found if fnmatchcase(info.name, name))
    if json:
        for address, info in rows:
            print_json(_as_json(address, info))
    else:
        print_table(COLUMNS, (_as_row(address, info) for address, info in rows))


def held_bytes(info: TensorInfo) -> int:
    """Return how many bytes of a tensor the worker holds."""
    return sum(prod(region.sizes) for region in info.regions) * info.dtype.itemsize


def _as_row(address: str, info: TensorInfo) -> tuple[object, ...]:
    return (
        address,
        info.target,
        info.name,
        info.dtype,
        list(info.shape),
        size(held_bytes(info)),
        "yes" if info.written else "no",
        "yes" if info.reloaded else "no",
        info.share_group or "-",
    )


def _as_json(address: str, info: TensorInfo) -> dict[str, object]:
    return {
        "worker": address,
        "target": str(info.target),
        "name": info.name,
        "dtype": str(info.dtype),
        "shape": info.shape,
        "regions": [{"offsets": r.offsets, "sizes": r.sizes} for r in info.regions],
        "bytes": held_bytes(info),
        "written": info.written,
        "share_group": info.share_group,
        "composite": info.composite,
        "reloaded": info.reloaded,
    }
