from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from weightsync_client import Fleet, VllmServer, push_model

from tests.vllm.checkpoints import VOCAB
from tests.vllm.drafts import PAIRS, Made
from tests.vllm.engine import PROMPTS, generate, running
from tests.vllm.source import Tensors
from weightsync.integrations.vllm.trainer import TrainerInfo

SHORT = 8


def add_tokenizer(folder: Path) -> None:
    """Give a checkpoint words, which a server wants to have."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))  # noqa: S106
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=words, unk_token="t0").save_pretrained(folder)  # noqa: S106


@contextmanager
def serving(made: Made) -> Iterator[str]:
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
    }
    process = subprocess.Popen(command, env=env)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def tokens(url: str) -> list[list[int]]:
    """Return the greedy tokens that follow the prompts."""
    body = {"model": "m", "prompt": PROMPTS, "max_tokens": SHORT, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return [choice["token_ids"] for choice in json.loads(answer.read())["choices"]]


def test_a_server_is_updated_without_code(tmp_path: Path) -> None:
    """A server that was started with one more option takes new weights for both its models."""
    old, new = (PAIRS["eagle"].make(tmp_path / str(seed), seed) for seed in (1, 2))
    with serving(old) as url, Fleet.from_vllm(url, timeout=400) as fleet:
        before = tokens(url)
        assert push_model(fleet, new.verifier_tensors, version="new").committed
        assert push_model(fleet, None, new.draft_tensors, version="draft").committed
        assert VllmServer(url).weight_version() == "new"
        after = tokens(url)

        # The same by vLLM's own client, which has no call for drafts.
        trainer = WeightTransferTrainerFactory.trainer_init(
            TrainerInfo(rank=0, workers=url),
            client=HTTPVLLMWeightSyncClient(url),
            source=Tensors(old.verifier_tensors),
        )
        trainer.send_weights()
        trainer.shutdown()
        assert VllmServer(url).weight_version() == "1"
        assert tokens(url) == before

        both = push_model(fleet, new.verifier_tensors, new.draft_tensors, version="both")
        assert both.committed
        assert VllmServer(url).weight_version() == "both"
        assert tokens(url) == after

    with running(new.verifier, **new.options) as llm:
        assert generate(llm, num_tokens=SHORT) == after != before
