from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from weightsync_client import Fleet

from tests.vllm import checkpoints, computing
from tests.vllm.drafts import PAIRS
from tests.vllm.engine import address_of, generate, push, running
from tests.vllm.proof import see
from weightsync.core.errors import UnsupportedError
from weightsync.core.regions import Region
from weightsync.core.types import CastPolicy, Target
from weightsync.engines.vllm.checkpoint import Checkpoint, TensorForm

DUMMIES = {
    "tied": (checkpoints.LLAMA | {"tie_word_embeddings": True}, "float32"),
    "experts": (checkpoints.QWEN3_MOE, "float32"),
    "rounded biases": (checkpoints.QWEN2, "bfloat16"),
    "computed": (computing.COMPUTING, "float32"),
}


@pytest.mark.parametrize(
    ("case", "weights"),
    [*((case, "packed") for case in DUMMIES), ("experts", "plain"), ("computed", "plain")],
    indirect=["weights"],
)
def test_made_up_weights_are_replaced_by_a_full_session(
    tmp_path: Path, case: str, weights: str
) -> None:
    """An engine that has read no weights has those of a fresh one after the first session."""
    config, dtype = DUMMIES[case]
    tensors = checkpoints.values(computing.shapes(config), 1)
    folder = checkpoints.write(tmp_path / "model", config, tensors)
    with running(folder, dtype=dtype, load_format="dummy") as llm:
        with Fleet([address_of(llm)]) as fleet:
            (status,) = fleet.workers[0].info().targets
            assert status.weight_version == ""
            assert status.num_unwritten == status.num_tensors
        made_up = generate(llm)
        push(llm, tensors, "first", cast=CastPolicy.ALLOW)
        sent = generate(llm)
    with running(folder, dtype=dtype) as llm:
        assert generate(llm) == sent != made_up


def test_a_made_up_pair_is_replaced_by_a_full_session(tmp_path: Path) -> None:
    """Verifier and draft are those of a fresh engine after the first session of both."""
    made = PAIRS["eagle"].make(tmp_path / "made", 1)
    with running(made.verifier, load_format="dummy", **made.options) as llm:
        with (
            Fleet([address_of(llm)]) as fleet,
            fleet.update(version="first", target=(Target.VERIFIER, Target.DRAFT)) as session,
        ):
            session.push(made.verifier_tensors, target=Target.VERIFIER)
            session.push(made.draft_tensors, target=Target.DRAFT)
            session.finish()
        sent = see(llm)
    with running(made.verifier, **made.options) as llm:
        assert see(llm) == sent


def test_made_up_weights_need_the_names_of_tensors(tmp_path: Path) -> None:
    """A folder without weights is refused, with what to do."""
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.LLAMA))
    with (
        pytest.raises(UnsupportedError, match="only their headers are read"),
        running(tmp_path, load_format="dummy"),
    ):
        pass


def test_pickled_weights_are_read(tmp_path: Path, new: checkpoints.Tensors) -> None:
    """A checkpoint of `torch.save` serves and is updated like one of safetensors."""
    old = checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 1)
    folder = checkpoints.write(tmp_path / "old", checkpoints.LLAMA, old)
    (folder / "model.safetensors").unlink()
    torch.save(old, folder / "pytorch_model.bin")
    with running(folder) as llm:
        before = generate(llm)
        push(llm, new, "new")
        after = generate(llm)
        push(llm, old, "old")
        assert generate(llm) == before
    with running(checkpoints.write(tmp_path / "new", checkpoints.LLAMA, new)) as llm:
        assert generate(llm) == after != before


# -- the files, without an engine ------------------------------------------------------------------

ONE, TWO = torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.int64)


def opened(folder: Path, model: object = None, **options: Any) -> Checkpoint:
    """Open the checkpoint in a folder as for a model that was loaded from it."""
    named: Any = SimpleNamespace(model=str(folder), revision=None)
    return Checkpoint(named, LoadConfig(**options), model)


def test_shards_are_read_as_their_index_says(tmp_path: Path) -> None:
    """Each name counts once, though a second copy of all tensors lies beside the shards."""
    save_file({"one": ONE}, tmp_path / "model-1.safetensors")
    save_file({"two": TWO}, tmp_path / "model-2.safetensors")
    save_file({"one": ONE, "two": TWO, "wq": ONE.clone()}, tmp_path / "consolidated.safetensors")
    index = {"one": "model-1.safetensors", "two": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with opened(tmp_path, load_format="hf") as checkpoint:
        assert checkpoint.forms() == {
            "one": TensorForm(torch.float32, (2, 3)),
            "two": TensorForm(torch.int64, (4,)),
        }
        assert checkpoint.read("one", Region((1, 0), (1, 2))).tolist() == [[3.0, 4.0]]
    # vLLM takes the other copy, if it may choose.
    with opened(tmp_path) as checkpoint:
        assert list(checkpoint.forms()) == ["one", "two", "wq"]


@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_files_of_torch_are_read(tmp_path: Path, load_format: str) -> None:
    """Names, types and regions come from a state dict that was saved."""
    torch.save({"one": ONE, "scale": torch.tensor(2.0), "step": 7}, tmp_path / "model.pt")
    with opened(tmp_path, load_format=load_format) as checkpoint:
        assert list(checkpoint.forms()) == ["one", "scale"]
        assert checkpoint.read("one", Region((0, 2), (2, 1))).tolist() == [[2.0], [5.0]]
        assert checkpoint.read("scale", Region((), ())).item() == 2.0


def test_further_files_of_a_model_are_read(tmp_path: Path) -> None:
    """What a model loads from elsewhere, under a prefix, belongs to its checkpoint."""
    for name, tensor in (("main", ONE), ("more", TWO)):
        (tmp_path / name).mkdir()
        save_file({"tensor": tensor}, tmp_path / name / "model.safetensors")
    source = DefaultModelLoader.Source(str(tmp_path / "more"), None, prefix="tower.")
    with opened(tmp_path / "main", SimpleNamespace(secondary_weights=[source])) as checkpoint:
        assert list(checkpoint.forms()) == ["tensor", "tower.tensor"]
        assert checkpoint.read("tower.tensor", Region((1,), (2,))).tolist() == [1, 2]


class Trap:
    """Something that would run when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("executed",)


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ({"one": ONE, "trap": Trap()}, {}),
        ({"one": ONE}, {"_use_new_zipfile_serialization": False}),
        ([ONE], {}),
    ],
    ids=["objects", "of an old form", "no state dict"],
)
def test_other_files_of_torch_are_refused(
    tmp_path: Path, content: object, options: dict[str, Any]
) -> None:
    """What is not simply tensors by name is not read, and not executed."""
    torch.save(content, tmp_path / "model.pt", **options)
    with pytest.raises(UnsupportedError, match="convert the checkpoint to safetensors"):
        opened(tmp_path, load_format="pt")


@pytest.mark.parametrize("load_format", ["gguf", "bitsandbytes", "sharded_state", "tensorizer"])
def test_other_load_formats_are_refused(tmp_path: Path, load_format: str) -> None:
    """The refusal names the format, and those that can be read."""
    with pytest.raises(UnsupportedError, match=f"{load_format}.*start vLLM from safetensors"):
        opened(tmp_path, load_format=load_format)


def test_made_up_weights_of_a_model_elsewhere_are_refused() -> None:
    """Nothing is downloaded for names alone."""
    with pytest.raises(UnsupportedError, match="give vLLM the folder of a checkpoint"):
        opened(Path("some/model"), load_format="dummy")
