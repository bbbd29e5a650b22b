"""What can be pushed, as shards.

A source is one of:

- a mapping from names to arrays (a state dict), or an iterable of such pairs;
- a `torch.nn.Module`: its parameters and persistent buffers;
- the path of a checkpoint folder or safetensors file, or a `Checkpoint`;
- an iterable of `Shard`.

An array is a torch tensor, a `DTensor` (this rank's part is sent), or anything that numpy takes
without a copy, e.g. a JAX array.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from weightsync.core.errors import InvalidRequestError
from weightsync_client.shards import Shard
from weightsync_client.sources.bytes_array import BytesArray
from weightsync_client.sources.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

Source: TypeAlias = (
    "Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[Shard] | torch.nn.Module"
    " | str | Path | Checkpoint"
)


def shards(source: Source) -> Iterator[Shard]:
    """Yield what a source holds, one array at a time.

    Raises:
        InvalidRequestError: it is none of the kinds of sources, or holds something that is no
            array.
        UnsupportedError: an array of a kind or element type that can't be sent.
        MalformedPayloadError: a file of a checkpoint is damaged.
    """
    torch = sys.modules.get("torch")
    if isinstance(source, str | Path):
        source = Checkpoint(source)
    elif torch is not None and isinstance(source, torch.nn.Module):
        source = _state(source)
    if isinstance(source, Mapping):
        source = source.items()
    if not isinstance(source, Iterable):
        raise InvalidRequestError(
            f"a {type(source).__name__} is no source of tensors: push a state dict, a module, a "
            f"checkpoint folder, or pairs of name and array",
            subjects=["source"],
        )
    for item in source:
        if isinstance(item, Shard):
            yield item
        else:
            yield from _named(item)


def is_stable(source: Source) -> bool:
    """Tell whether all arrays of a source stay as they are until the push ends."""
    torch = sys.modules.get("torch")
    module = torch is not None and isinstance(source, torch.nn.Module)
    return module or isinstance(source, Mapping | Sequence | Path | Checkpoint)


def _state(module: torch.nn.Module) -> dict[str, Any]:
    # What a module adds by get_extra_state is no tensor and belongs to its own process.
    state = module.state_dict()
    return {k: v for k, v in state.items() if k.rsplit(".", 1)[-1] != "_extra_state"}


def _named(item: Any) -> Iterator[Shard]:  # noqa: ANN401 - checked here
    try:
        name, value = item
    except (TypeError, ValueError):
        name, value = None, None
    if not isinstance(name, str):
        raise InvalidRequestError(
            f"a source must give pairs of name and array, not {type(item).__name__}",
            subjects=["source"],
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        yield from _tensor(name, value)
    elif hasattr(value, "__array__") or isinstance(value, np.ndarray):
        yield Shard.whole(name, BytesArray.from_numpy(np.asarray(value), name))
    else:
        raise InvalidRequestError(
            f"{name!r} is a {type(value).__name__}, no array: push tensors only", subjects=[name]
        )


def _tensor(name: str, tensor: torch.Tensor) -> Iterator[Shard]:
    from weightsync_client.sources.torch_array import TorchArray  # noqa: PLC0415 - torch is loaded

    placed = sys.modules.get("torch.distributed.tensor")
    if placed is not None and isinstance(tensor, placed.DTensor):
        from weightsync_client.sources.dtensor import local_shards  # noqa: PLC0415

        yield from local_shards(name, tensor)
    else:
        yield Shard.whole(name, TorchArray(tensor, name))
