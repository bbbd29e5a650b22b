"""Feeds sessions of a worker with tensors, as a transport would, and compares bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from weightsync.apply.dtypes import from_torch
from weightsync.core.regions import Region
from weightsync.core.types import ChecksumType, Scope, Segment, Target, UpdateRequest
from weightsync.server.worker import Worker
from weightsync.wire.chunk import parse_chunk, serialize_chunk

Tensors = Mapping[str, torch.Tensor]
Piece = tuple[Segment, memoryview]


def raw(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as the wire has them."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().tobytes())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare as bits: NaN equals itself, -0.0 is not 0.0."""
    return (one.dtype, one.shape, raw(one)) == (other.dtype, other.shape, raw(other))


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of what a checkpoint of a module holds."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def unchanged(module: torch.nn.Module, before: Tensors) -> bool:
    """Tell whether a module holds, bit for bit, what it held."""
    now = module.state_dict()
    return now.keys() == before.keys() and all(same_bits(now[n], before[n]) for n in now)


def fresh(tensors: Tensors, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return new random bytes of the same form; floats are ordinary numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        for name, t in tensors.items()
    }


def pieces(
    target: Target,
    name: str,
    tensor: torch.Tensor,
    *,
    cut: int | None = None,
    region: Region | None = None,
    shape: tuple[int, ...] | None = None,
) -> Iterator[Piece]:
    """Yield a tensor as segments of at most `cut` bytes.

    With `region` the tensor is that part of a tensor of global `shape`.
    """
    data = raw(tensor)
    whole = tuple(tensor.shape) if shape is None else shape
    part = region or Region.whole(whole)
    step = cut or max(len(data), 1)
    for start in range(0, max(len(data), 1), step):
        run = data[start : start + step]
        yield (
            Segment(target, name, from_torch(tensor.dtype), whole, part, start, len(run)),
            run,
        )


def all_pieces(target: Target, tensors: Tensors, cut: int | None = None) -> list[Piece]:
    """Return several tensors as segments."""
    return [p for name, t in tensors.items() for p in pieces(target, name, t, cut=cut)]


def send(worker: Worker, session_id: str, messages: Iterable[Iterable[Piece]]) -> None:
    """Send one stream of messages, each of some pieces, through the real wire form."""
    with worker.stream(session_id) as sink:
        for message in messages:
            segments, buffers = zip(*message, strict=True)
            data = serialize_chunk(session_id, segments, buffers, ChecksumType.XXH3_64)
            sink.write(parse_chunk(data, worker.limits))


def push(worker: Worker, session_id: str, target: Target, tensors: Tensors) -> None:
    """Send whole tensors, one per message."""
    send(worker, session_id, ([piece] for piece in all_pieces(target, tensors)))


def request(
    *targets: Target, scope: Scope = Scope.FULL, version: str = "v1", **more: object
) -> UpdateRequest:
    """Return a request for the named targets, default the verifier."""
    wanted = frozenset(targets or [Target.VERIFIER])
    return UpdateRequest(wanted, scope, version, **more)  # type: ignore[arg-type]


def failing_at(name: str, match: str = "") -> Callable[[str, dict[str, object]], None]:
    """Return a trace hook that raises at a step, if its parameter ends as told."""

    def hook(step: str, facts: dict[str, object]) -> None:
        if step == name and str(facts.get("parameter", "")).endswith(match):
            raise OSError(f"injected at {name}")

    return hook
