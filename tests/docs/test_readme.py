from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.docs.pages import ROOT, Block, blocks, read, run, table
from weightsync.server.server import Server
from weightsync.testing.models import tiny_pair

PAGE = "README.md"
ADDRESS = "127.0.0.1:50051"
EXAMPLE = ROOT / "clients" / "examples" / "bare_stubs.py"


def test_the_trainer_is_the_example() -> None:
    """The trainer on plain stubs is shown as it is in the file, which has a test of its own."""
    shown = [b.text for b in blocks(PAGE, "python") if "import numpy" in b.text]
    assert shown == [EXAMPLE.read_text(encoding="utf-8")]


def test_the_lines_of_python_work_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker of one block takes the push of the next one."""
    worker, trainer = (b for b in blocks(PAGE, "python") if "import numpy" not in b.text)
    address = f"unix://{tmp_path}/w"

    def here(block: Block) -> Block:
        assert ADDRESS in block.text
        return Block("python", block.text.replace(ADDRESS, address), block.line)

    verifier, draft = tiny_pair()
    names: dict[str, object] = {"model": verifier, "draft": draft}
    run(here(worker), PAGE, names)
    server = names["server"]
    assert isinstance(server, Server)
    with server:
        names["model"], names["draft"] = tiny_pair(seed=1)
        run(here(trainer), PAGE, names)
    assert "committed (verifier 'step-100', draft 'step-100')" in capsys.readouterr().out


def small_model(layers: int, seed: int) -> LlamaForCausalLM:
    """Return a model of transformers with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


def test_the_commands_work_together(tmp_path: Path) -> None:
    """The worker of the first block does what the commands of the second one ask."""
    verifier, draft = small_model(2, seed=0), small_model(1, seed=1)
    draft.model.embed_tokens.weight = verifier.model.embed_tokens.weight
    draft.lm_head.weight = verifier.lm_head.weight
    verifier.save_pretrained(tmp_path / "policy")
    draft.save_pretrained(tmp_path / "draft")
    address = f"unix://{tmp_path}/w"
    weightsync = f"{sys.executable} -m weightsync.cli"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients'}"}
    serving, asking = (
        [
            re.sub("^weightsync", weightsync, line).replace(ADDRESS, address).split()
            for line in block.text.splitlines()
        ]
        for block in blocks(PAGE, "sh")
        if block.text.startswith("weightsync")
    )
    (serve,) = serving
    with subprocess.Popen(
        serve, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline().strip() == address
            for command in asking:
                done = subprocess.run(
                    command,
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=60,
                )
                assert done.returncode == 0, (command, done.stderr)
                assert done.stdout
        finally:
            worker.terminate()
    assert worker.returncode == 0


def test_the_two_commands_are_targets_of_make() -> None:
    """What the page tells to type is in the Makefile."""
    makefile = read("Makefile")
    typed = [b.text.split() for b in blocks(PAGE, "sh") if b.text.startswith("make")]
    (words,) = typed
    for target in words[1::2]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_folders_of_tests_are_there() -> None:
    """Each promise is held by tests that exist."""
    for _, folders in table(PAGE, "## What is promised, and how it is tested"):
        for folder in re.findall(r"`([^`]+)`", folders):
            assert list((ROOT / folder).glob("test_*.py")), folder
