"""A checkpoint folder that is not whole never reaches a worker's live weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from weightsync_client import push_model

from tests.integration.raw import all_bits, noise
from weightsync.core.errors import IncompleteError, InvalidRequestError, MalformedPayloadError
from weightsync.server.server import Server
from weightsync.testing.models import Tiny

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint of two files and their index."""
    folder.mkdir(exist_ok=True)
    where = {name: FILES[number % 2] for number, name in enumerate(tensors)}
    for file in FILES:
        part = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def without_a_file(folder: Path) -> None:
    """Lose a file that the index names."""
    (folder / FILES[1]).unlink()


def cut_short(folder: Path) -> None:
    """Lose the end of a file, as a copy does that ran out of space."""
    file = folder / FILES[1]
    file.write_bytes(file.read_bytes()[:-8])


def without_a_tensor(folder: Path) -> None:
    """Lose a tensor, as a checkpoint does that was saved by an adapter's rules."""
    tensors = {name: t for file in FILES for name, t in load_file(folder / file).items()}
    del tensors["fc.weight"]
    write(folder, tensors)


CASES = [
    (without_a_file, InvalidRequestError, FILES[1]),
    (cut_short, MalformedPayloadError, FILES[1]),
    (without_a_tensor, IncompleteError, "fc.weight"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_a_damaged_checkpoint_changes_nothing(
    server: Server,
    models: tuple[Tiny, Tiny],
    tmp_path: Path,
    case: tuple[Callable[[Path], None], type[Exception], str],
) -> None:
    """The error names what is wrong, the old weights serve on, and a whole folder goes through."""
    damage, kind, text = case
    new = noise(models[0])
    write(tmp_path / "good", new)
    write(tmp_path / "bad", new)
    damage(tmp_path / "bad")
    before = [all_bits(model) for model in models]
    with pytest.raises(kind, match=text):
        push_model(server.address, tmp_path / "bad", version="v1")
    assert [all_bits(model) for model in models] == before
    statuses = server.worker.info().targets
    assert {(s.session_id, s.weight_version) for s in statuses} == {("", "")}
    push_model(server.address, tmp_path / "good", version="v1")
    assert all_bits(models[0]) == {name: t.numpy().tobytes() for name, t in new.items()}
