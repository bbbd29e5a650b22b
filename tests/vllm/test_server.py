from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from weightsync_client import Fleet

from tests.vllm.checkpoints import VOCAB
from tests.vllm.drafts import PAIRS, Made
from tests.vllm.engine import PROMPTS, generate, running
from weightsync.core.types import Target

SHORT = 8


def add_tokenizer(folder: Path) -> None:
    """Give a checkpoint words, which a server wants to have."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))  # noqa: S106
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=words, unk_token="t0").save_pretrained(folder)  # noqa: S106


@contextmanager
def serving(made: Made, directory: Path) -> Iterator[str]:
    """Run vLLM's server as a user does, and return its address."""
    add_tokenizer(made.verifier)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--model", str(made.verifier), "--served-model-name", "m", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4", "--seed", "0"]
    command += ["--kv-cache-memory-bytes", str(32 << 20), "--host", "127.0.0.1"]
    command += ["--weight-transfer-config", '{"backend": "weightsync"}']
    command += ["--speculative-config", json.dumps(made.options["speculative_config"])]
    env = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "WEIGHTSYNC_VLLM_DIRECTORY": str(directory),
    }
    process = subprocess.Popen(command, env=env)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request and return the answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method="POST")  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        text = answer.read()
        return json.loads(text) if text.strip() else None


def tokens(url: str) -> list[list[int]]:
    """Return the greedy tokens that follow the prompts."""
    body = {"model": "m", "prompt": PROMPTS, "max_tokens": SHORT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return [choice["token_ids"] for choice in ask(f"{url}/v1/completions", body)["choices"]]


def test_a_server_is_updated_without_code(tmp_path: Path) -> None:
    """A server that was started with one more option takes new weights for both its models."""
    old, new = (PAIRS["eagle"].make(tmp_path / str(seed), seed) for seed in (1, 2))
    with (
        serving(old, tmp_path / "ranks") as url,
        Fleet.from_vllm(tmp_path / "ranks", timeout=400) as fleet,
    ):
        wait_for(url)

        def commit(session_ids: Sequence[str]) -> None:
            ask(f"{url}/pause?mode=keep")
            ask(f"{url}/start_weight_update")
            infos = [{"session_id": one} for one in session_ids]
            ask(f"{url}/update_weights", {"update_info": infos})
            ask(f"{url}/finish_weight_update", {"weight_version": "new"})
            ask(f"{url}/resume")

        before = tokens(url)
        with fleet.update(version="new", target=(Target.VERIFIER, Target.DRAFT)) as session:
            session.push(new.verifier_tensors, target=Target.VERIFIER)
            session.push(new.draft_tensors, target=Target.DRAFT)
            session.finish(commit)
        after = tokens(url)

    with running(new.verifier, **new.options) as llm:
        assert generate(llm, num_tokens=SHORT) == after != before


def wait_for(url: str) -> None:
    """Return when the server answers; its workers have told where they are before."""
    end = time.monotonic() + 240
    while not answers(url):
        assert time.monotonic() < end, "the server does not answer"
        time.sleep(0.1)  # there is nothing to wait on in another program


def answers(url: str) -> bool:
    """Tell whether the server is up."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=60).close()  # noqa: S310
    except OSError:
        return False
    return True
