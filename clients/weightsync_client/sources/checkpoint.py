"""Hugging Face checkpoint folders: safetensors files, read tensor by tensor from their mapping."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weightsync.core.dtypes import DType
from weightsync.core.errors import InvalidRequestError, MalformedPayloadError, UnsupportedError
from weightsync_client.shards import Shard
from weightsync_client.sources.bytes_array import BytesArray

_MAX_HEADER_BYTES = 100 << 20
_PREFIX_BYTES = 8

_DTYPES = {
    "BOOL": DType.BOOL,
    "I8": DType.INT8,
    "I16": DType.INT16,
    "I32": DType.INT32,
    "I64": DType.INT64,
    "U8": DType.UINT8,
    "U16": DType.UINT16,
    "U32": DType.UINT32,
    "U64": DType.UINT64,
    "F16": DType.FLOAT16,
    "BF16": DType.BFLOAT16,
    "F32": DType.FLOAT32,
    "F64": DType.FLOAT64,
    "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E4M3FNUZ": DType.FLOAT8_E4M3FNUZ,
    "F8_E5M2": DType.FLOAT8_E5M2,
    "F8_E5M2FNUZ": DType.FLOAT8_E5M2FNUZ,
    "F8_E8M0": DType.FLOAT8_E8M0FNU,
    "F4": DType.FLOAT4_E2M1FN_X2,
    "C64": DType.COMPLEX64,
}


class Checkpoint:
    """A folder with `model.safetensors`, or with an index and its shard files, or one such file.

    Nothing but headers is read before a tensor is sent.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the files and check that all of them are there.

        Raises:
            InvalidRequestError: no checkpoint, or a shard file is missing; it is named.
        """
        self.path = Path(path)
        self.files = _files(self.path)

    def __iter__(self) -> Iterator[Shard]:
        """Yield all tensors, file by file.

        Raises:
            MalformedPayloadError: a file is cut off, or is no safetensors file.
            UnsupportedError: an element type that the wire does not have.
        """
        for file in self.files:
            yield from _read(file)


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    indices = sorted(path.glob("*.safetensors.index.json"))
    if not indices:
        files = tuple(sorted(path.glob("*.safetensors")))
        if not files:
            raise InvalidRequestError(
                f"{path} is no checkpoint: it has no *.safetensors file", subjects=["path"]
            )
        return files
    if len(indices) > 1:
        raise InvalidRequestError(
            f"{path} has several indices ({', '.join(i.name for i in indices)}); "
            f"pass a folder with one",
            subjects=["path"],
        )
    try:
        names = sorted(set(json.loads(indices[0].read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequestError(
            f"{indices[0]} is no index of a checkpoint: {error}", subjects=["path"]
        ) from None
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise InvalidRequestError(
            f"{indices[0]} names files outside of its folder", subjects=["path"]
        )
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise InvalidRequestError(
            f"{path} lacks {len(missing)} of the {len(names)} files that {indices[0].name} names: "
            f"{', '.join(missing[:10])}",
            subjects=missing,
        )
    return tuple(path / name for name in names)


def _read(file: Path) -> Iterator[Shard]:
    with file.open("rb") as opened:
        size = file.stat().st_size
        if size < _PREFIX_BYTES:
            raise MalformedPayloadError(f"{file} is cut off: it has {size} bytes")
        content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    length = int.from_bytes(content[:_PREFIX_BYTES], "little")
    start = _PREFIX_BYTES + length
    if length > _MAX_HEADER_BYTES or start > size:
        raise MalformedPayloadError(
            f"{file} is no safetensors file, or is cut off: its header would have {length} bytes"
        )
    try:
        header = json.loads(bytes(content[_PREFIX_BYTES:start]))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError) as error:
        raise MalformedPayloadError(f"{file} is no safetensors file: {error}") from None
    # In the order of the file, which disks read fastest.
    for name, entry in sorted(entries.items(), key=lambda item: _begin(file, *item)):
        dtype, shape, begin, end = _entry(file, name, entry)
        if not 0 <= begin <= end <= size - start:
            raise MalformedPayloadError(
                f"{file} is cut off: tensor {name!r} would end at byte {start + end} of {size}"
            )
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise MalformedPayloadError(
                f"{file}: tensor {name!r} of shape {list(shape)} and type {dtype} has "
                f"{end - begin} bytes"
            )
        data = content[start + begin : start + end]
        yield Shard.whole(name, BytesArray.from_buffer(data, dtype, shape))


def _begin(file: Path, name: str, entry: Any) -> int:  # noqa: ANN401 - what a file says
    return _entry(file, name, entry)[2]


def _entry(
    file: Path,
    name: str,
    entry: Any,  # noqa: ANN401 - what a file says
) -> tuple[DType, tuple[int, ...], int, int]:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise MalformedPayloadError(f"{file}: the entry of tensor {name!r} is incomplete") from None
    if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
        raise MalformedPayloadError(f"{file}: the entry of tensor {name!r} has no plain numbers")
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise UnsupportedError(
            f"{file}: tensor {name!r} has the element type {kind!r}, which the wire does not have",
            subjects=[name],
        )
    if dtype is DType.FLOAT4_E2M1FN_X2 and shape:
        # Files count the halves of a byte, the wire counts bytes.
        shape = (*shape[:-1], shape[-1] // 2)
    return dtype, shape, begin, end
