"""Checkpoints are data: whoever wrote one does not get to run code where it is loaded."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from weightsync_client import Checkpoint

from weightsync.cli.checkpoints import Kind, load_model
from weightsync.core.errors import WeightSyncError
from weightsync.loader import load_pair

ROOT = Path(__file__).parents[2]
SOURCES = [p for folder in ("weightsync", "clients") for p in (ROOT / folder).rglob("*.py")]
CODE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
RUNS = {"eval", "exec", "compile", "__import__"}


def imported(tree: ast.AST) -> set[str]:
    """Return the names of all packages that a program imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpickled(path: Path) -> None:
    """No part of the worker or the client reads data that can be code, or runs text as code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imported(tree) & CODE
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        assert name not in RUNS
        if name == "torch.load":
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert said.get("weights_only") == "True"
        assert {k.arg: ast.unparse(k.value) for k in call.keywords}.get(
            "trust_remote_code"
        ) != "True"


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._folder),)


def pickled(folder: Path, mark: Path) -> None:
    """Write a checkpoint whose weights are a pickle that runs code."""
    LlamaConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    torch.save({"model.norm.weight": Bomb(mark)}, folder / "pytorch_model.bin")


def with_code(folder: Path, mark: Path) -> None:
    """Write a checkpoint that brings code of its own for its model."""
    classes = {"AutoConfig": "bomb.Config", "AutoModelForCausalLM": "bomb.Model"}
    config = {"model_type": "bomb", "architectures": ["Model"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "bomb.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")


def served(folder: Path) -> object:
    """Load it as `weightsync serve` does."""
    return load_model(folder, Kind.CAUSAL, "cpu")


def paired(folder: Path) -> object:
    """Load it beside itself, as a pair."""
    return load_pair(folder, folder)


def pushed(folder: Path) -> object:
    """Read it as `weightsync push` does."""
    return list(Checkpoint(folder))


@pytest.mark.parametrize("write", [pickled, with_code], ids=lambda f: f.__name__)
@pytest.mark.parametrize("load", [served, paired, pushed], ids=lambda f: f.__name__)
def test_a_checkpoint_runs_no_code(
    write: Callable[[Path, Path], None], load: Callable[[Path], object], tmp_path: Path
) -> None:
    """Neither a pickle nor a file of code in a checkpoint's folder is run: it is an error."""
    folder, mark = tmp_path / "checkpoint", tmp_path / "code-ran"
    folder.mkdir()
    write(folder, mark)
    with pytest.raises(WeightSyncError):
        load(folder)
    assert not mark.exists()
