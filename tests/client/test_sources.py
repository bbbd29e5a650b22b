from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weightsync_client import Checkpoint, Shard
from weightsync_client.shards import Array, pieces
from weightsync_client.sources import Source, shards

from weightsync.core.dtypes import DType
from weightsync.core.errors import (
    InvalidRequestError,
    MalformedPayloadError,
    OutOfBoundsError,
    UnsupportedError,
)
from weightsync.core.regions import Region

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def content(array: Array) -> bytes:
    """Return all bytes of an array, read in pieces that do not fit its rows."""
    whole = Region.whole(array.shape)
    return b"".join(map(bytes, pieces(array, whole, block_bytes=7 * array.dtype.itemsize)))


def expected(tensor: Any) -> bytes:
    """Return a tensor's row-major bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def one(source: Source) -> Shard:
    """Return the only shard of a source."""
    (shard,) = shards(source)
    return shard


LAYOUTS = {
    "contiguous": lambda: torch.randn(6, 10),
    "transposed": lambda: torch.randn(10, 6).t(),
    "strided": lambda: torch.randn(6, 20)[:, ::2],
    "expanded": lambda: torch.randn(10).expand(6, 10),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice of a larger storage": lambda: torch.randn(1000)[17:77].view(6, 10),
    "0-dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "conjugate": lambda: torch.randn(6, 10, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(6, 10, dtype=torch.complex64).conj().imag,
    "requires grad": lambda: torch.randn(6, 10, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(6, 10)),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_layout_gives_its_row_major_bytes(make: Any) -> None:
    """B47: strides, views and lazy bits of a tensor do not show in what is sent."""
    tensor = make()
    shard = one({"w": tensor})
    assert shard.shape == tuple(tensor.shape)
    assert content(shard.array) == expected(tensor)


@pytest.mark.parametrize("dtype", [d for d in DType if hasattr(torch, str(d))], ids=str)
def test_every_element_type_is_sent_as_it_is(dtype: DType) -> None:
    """B40, B42, B45: bytes of each type go through unchanged, NaN payloads included."""
    raw = torch.randint(0, 2 if dtype is DType.BOOL else 256, (3, 4 * dtype.itemsize))
    tensor = raw.to(torch.uint8).view(getattr(torch, str(dtype)))
    shard = one({"w": tensor})
    assert shard.array.dtype is dtype
    assert content(shard.array) == bytes(raw.to(torch.uint8).numpy())


def test_a_contiguous_tensor_is_read_without_a_copy() -> None:
    """B73: what lies in one piece in host memory is looked at, not copied."""
    tensor = torch.zeros(8, 4)
    view = one({"w": tensor}).array.read(Region((2, 0), (3, 4)))
    tensor += 1
    assert np.frombuffer(view, np.float32).tolist() == [1.0] * 12


def test_a_trainer_may_free_what_it_pushed() -> None:
    """A tensor's storage can be resized after it was read, as sharded training does."""
    tensor = torch.ones(6, 10)
    bytes(content(one({"w": tensor}).array))
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_a_module_gives_parameters_and_persistent_buffers() -> None:
    """B37: persistent buffers are sent, others are not, and tied names both appear."""
    module = torch.nn.Linear(4, 4)
    module.register_buffer("rbias", torch.zeros(4))
    module.register_buffer("rot", torch.zeros(4), persistent=False)
    module.tied = torch.nn.Linear(4, 4, bias=False)
    module.tied.weight = module.weight
    assert {s.name for s in shards(module)} == {"weight", "bias", "rbias", "tied.weight"}


def test_extra_state_of_a_module_is_left_out() -> None:
    """What a module keeps by get_extra_state is no tensor and is not sent."""

    class Stateful(torch.nn.Linear):  # type: ignore[misc, name-defined, unused-ignore]
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    assert {s.name for s in shards(Stateful(2, 2))} == {"weight", "bias"}


def test_numpy_arrays_are_sources() -> None:
    """Arrays of numpy, big-endian and strided ones included, are sent little-endian."""
    values = np.arange(12, dtype=">f4").reshape(3, 4).T
    shard = one([("w", values)])
    assert shard.array.dtype is DType.FLOAT32
    assert content(shard.array) == values.astype("<f4").tobytes()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (3, InvalidRequestError),
        ([("w", "text")], InvalidRequestError),
        ({"w": None}, InvalidRequestError),
        (["w"], InvalidRequestError),
        ({"w": np.array(["text"])}, UnsupportedError),
        ({"w": np.array([{}])}, UnsupportedError),
        ({"w": torch.empty(2, device="meta")}, UnsupportedError),
        ({"w": torch.eye(3).to_sparse()}, UnsupportedError),
    ],
)
def test_what_is_no_tensor_is_refused(source: Any, error: type[Exception]) -> None:
    """Anything that is no dense array of a known type is refused with its name."""
    with pytest.raises(error):
        list(shards(source))


def test_a_shard_must_fill_its_region() -> None:
    """A region that is not the array's, or leaves the tensor, is refused."""
    array = one({"w": np.zeros((2, 4))}).array
    for region in (Region((0, 0), (3, 4)), Region((9, 0), (2, 4)), Region((0,), (2,))):
        with pytest.raises(OutOfBoundsError):
            Shard("w", array, (10, 4), region)


def test_a_source_keeps_no_tensor_alive() -> None:
    """B74: once it is read, nothing holds on to a tensor."""
    made: list[weakref.ref[Any]] = []

    def produce() -> Any:
        for _ in range(3):
            tensor = torch.zeros(10)
            made.append(weakref.ref(tensor))
            yield "w", tensor
            del tensor

    for shard in shards(produce()):
        content(shard.array)
    del shard
    gc.collect()
    assert [ref() for ref in made] == [None] * 3


# -- checkpoint folders ----------------------------------------------------------------------------


def write_sharded(folder: Path) -> dict[str, Any]:
    """Write a checkpoint of two files and an index; return its tensors."""
    tensors = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b": torch.randn(4).to(torch.float8_e4m3fn),
        "c": torch.tensor(2.5),
        "d": torch.empty(0, 3),
    }
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {"a": names[0], "b": names[0], "c": names[1], "d": names[1]}
    for name in names:
        part = {k: v for k, v in tensors.items() if where[k] == name}
        safetensors_torch.save_file(part, folder / name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_a_sharded_checkpoint_is_read_bit_for_bit(tmp_path: Path) -> None:
    """All tensors of all files come, with their types and shapes."""
    tensors = write_sharded(tmp_path)
    found = {s.name: s for s in shards(tmp_path)}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape)
        assert content(found[name].array) == expected(tensor)


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    """A safetensors file, and a folder with nothing but one, are sources too."""
    safetensors_torch.save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert one(tmp_path).name == one(str(tmp_path / "model.safetensors")).name == "w"


def test_a_missing_shard_file_is_found_before_anything_is_read(tmp_path: Path) -> None:
    """The error names the file that the index promises."""
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="model-00002-of-00002"):
        Checkpoint(tmp_path)


def test_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    """A path in the index is refused, whatever lies there."""
    safetensors_torch.save_file({"w": torch.ones(3)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    index = {"weight_map": {"w": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequestError, match="outside of its folder"):
        Checkpoint(folder)


def test_no_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    """A folder without safetensors files, or none at all, is told by its path."""
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InvalidRequestError, match="no checkpoint"):
            Checkpoint(path)


def damaged(good: bytes) -> dict[str, bytes]:
    """Return ways in which a safetensors file can be damaged."""
    length = int.from_bytes(good[:8], "little")

    def with_header(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + good[8 + length :]

    def entry(**fields: Any) -> bytes:
        return with_header(
            {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **fields}}
        )

    return {
        "empty": b"",
        "no header": good[:5],
        "half a header": good[: 8 + length // 2],
        "half the data": good[:-5],
        "huge header": (1 << 62).to_bytes(8, "little") + good[8:],
        "no JSON": good[:8] + b"\xff" * length + good[8 + length :],
        "a list": with_header([1]),
        "no entry": with_header({"w": 3}),
        "negative offset": entry(data_offsets=[-24, 0]),
        "huge count": entry(shape=[1 << 63, 1 << 63]),
        "wrong size": entry(shape=[2, 4]),
        "float shape": entry(shape=[2.0, 3.0]),
        "reversed": entry(data_offsets=[24, 0]),
    }


GOOD = safetensors_torch.save({"w": torch.ones(2, 3)})


@pytest.mark.parametrize("data", damaged(GOOD).values(), ids=list(damaged(GOOD)))
def test_a_damaged_file_is_a_clear_error(data: bytes, tmp_path: Path) -> None:
    """Whatever is wrong with a file, the error names it and nothing else happens."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(MalformedPayloadError, match=r"model\.safetensors"):
        list(shards(path))


def test_an_unknown_element_type_is_named(tmp_path: Path) -> None:
    """B45: a type that only newer files know is refused by its name."""
    text = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(UnsupportedError, match="F6_E2M3"):
        list(shards(path))
