from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.vllm.proof import Comparison, Seen
from tests.vllm.ranks import RANKS

ROOT = Path(__file__).parents[2]
Ranks = Callable[[Sequence[str]], list[Comparison]]

CASES = [
    ("llama", "float32", "packed"),
    ("llama tied", "bfloat16", "packed"),
    ("llama odd vocabulary", "float32", "packed"),
    ("llama odd vocabulary tied", "bfloat16", "plain"),
    # One head of keys and values, which both ranks hold.
    ("qwen2", "float32", "packed"),
    ("qwen3", "bfloat16", "plain"),
    ("qwen3 moe", "float32", "packed"),
    ("qwen3 moe", "bfloat16", "plain"),
    ("llama that computes", "float32", "packed"),
    ("deepseek", "bfloat16", "packed"),
    ("idefics3", "float32", "packed"),
]


def free_ports(count: int) -> list[str]:
    """Return ports on which nothing listens."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [str(one.getsockname()[1]) for one in sockets]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Start the ranks; return how they run a case."""
    folder = tmp_path_factory.mktemp("ranks")
    ports = free_ports(2 * len(CASES))
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients'}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.ranks", str(rank), str(folder), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(RANKS)
    ]

    def run(case: Sequence[str]) -> list[Comparison]:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
        return [seen_by(process) for process in processes]

    yield run
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0


def seen_by(process: subprocess.Popen[str]) -> Comparison:
    """Return what a rank tells next."""
    assert process.stdout is not None
    told = process.stdout.readline()
    assert told, "a rank has ended"
    return Comparison(**{when: Seen(**seen) for when, seen in json.loads(told).items()})


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_an_update_of_two_ranks_is_as_good_as_a_fresh_start(
    ranks: Ranks, case: Sequence[str]
) -> None:
    """On each of two tensor-parallel ranks tokens and logits are those of two fresh ones."""
    for comparison in ranks(case):
        comparison.check()
