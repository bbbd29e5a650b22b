"""The life of a server and of the process around it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import weightsync
from tests.integration.conftest import Start
from tests.integration.raw import VERIFIER, RawTrainer, all_bits, bits, chunk, noise, told
from weightsync.core.errors import DrainingError, InvalidRequestError
from weightsync.core.trace import Trace
from weightsync.engines.modules import ModuleEngine
from weightsync.testing.models import Tiny, tiny_pair
from weightsync.v1 import types_pb2, weight_sync_pb2

Models = tuple[Tiny, Tiny]


def run(program: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end, warnings being errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *args],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | env,
    )


def test_the_package_serves_by_name_only() -> None:
    """Importing the package imports no gRPC and starts no thread, until serving is asked (B82)."""
    run(
        "import sys, threading, weightsync\n"
        "assert not {'grpc', 'torch', 'google.protobuf'} & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
        "assert callable(weightsync.serve) and 'grpc' in sys.modules\n"
        "assert threading.active_count() == 1\n"
    )


def test_an_unknown_name_of_the_package_is_an_error() -> None:
    """What the package does not have is an AttributeError, as of any module."""
    with pytest.raises(AttributeError, match="server"):
        _ = weightsync.server_of_dreams


def test_one_line_serves_and_a_block_ends_it(models: Models) -> None:
    """The server serves at once, tells its address, and stops with the block."""
    with weightsync.serve(*models) as server:
        assert server.address in repr(server)
        assert "serving" in repr(server)
        with RawTrainer(server.address) as trainer:
            assert [s.target for s in trainer.worker().targets] == [1, 2]
        assert not server.wait(0)
    assert server.wait(0)
    assert "stopped" in repr(server)
    server.stop()


def test_a_draft_alone_and_an_engine_can_be_served(start: Start, models: Models) -> None:
    """A draft needs no verifier beside it, and an engine stands for its models."""
    for server in (start(None, models[1]), start(engine=ModuleEngine(None, models[1]))):
        with RawTrainer(server.address) as trainer:
            assert [s.target for s in trainer.worker().targets] == [types_pb2.TARGET_DRAFT]


def test_nothing_or_too_much_is_refused(models: Models) -> None:
    """Models and an engine exclude each other, and one of them is needed."""
    with pytest.raises(InvalidRequestError, match="engine"):
        weightsync.serve()
    with pytest.raises(InvalidRequestError, match="engine"):
        weightsync.serve(*models, engine=ModuleEngine(*models))


def test_hugging_face_models_get_their_engine(start: Start) -> None:
    """A pair of transformers models is served under the names of their checkpoints."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    verifier, draft = (transformers.LlamaForCausalLM(config) for _ in range(2))
    for models, engine in (((verifier, draft), "transformers"), ((verifier, Tiny()), "torch")):
        with RawTrainer(start(*models).address) as trainer:
            assert trainer.worker().engine == engine


def test_a_failed_start_leaves_nothing(start: Start, models: Models) -> None:
    """A server that gets no address leaves no thread and no hook behind, and can be tried again."""
    taken = start(*models)
    threads = threading.active_count()
    trace = Trace()
    refused: tuple[dict[str, Any], ...] = ({"address": taken.address}, {"address": "0.0.0.0:0"})
    for options in refused:
        with pytest.raises(InvalidRequestError):
            weightsync.serve(*models, trace=trace, **options)
    port = int(taken.address.rpartition(":")[2])
    with pytest.raises(InvalidRequestError, match="metrics"):
        weightsync.serve(*models, trace=trace, metrics_port=port)
    assert threading.active_count() == threads


def test_two_servers_share_a_process(start: Start) -> None:
    """Each server has its own models, its own identity and its own address."""
    first, second = start(Tiny()), start(Tiny())
    with RawTrainer(first.address) as one, RawTrainer(second.address) as two:
        assert one.worker().instance_id != two.worker().instance_id
        session = one.start(VERIFIER)
        assert not two.worker().targets[0].session_id
        assert one.worker().targets[0].session_id == session


def test_a_stopping_server_lets_open_sessions_finish(start: Start, models: Models) -> None:
    """During the grace no session can be opened, and those that are open can be committed."""
    server = start(*models)
    new = noise(models[0])
    with RawTrainer(server.address) as trainer, ThreadPoolExecutor(1) as pool:
        events = trainer.stub.WatchWorker(weight_sync_pb2.WatchWorkerRequest(), timeout=60)
        next(events)
        session = trainer.start(VERIFIER)
        server.worker.drain()
        stopped = pool.submit(server.stop, 60.0)
        with pytest.raises(DrainingError), told():
            trainer.start(types_pb2.TARGET_DRAFT)
        trainer.push(session, VERIFIER, new)
        trainer.finish(session)
        stopped.result(60)
        kind = weight_sync_pb2.WatchWorkerResponse
        assert [event.kind for event in events] == [
            kind.KIND_STARTED, kind.KIND_PREPARED, kind.KIND_COMMITTED,
        ]  # fmt: skip
    assert all_bits(models[0]) == {name: bits(t) for name, t in new.items()}


def test_a_stopped_server_leaves_the_old_weights(start: Start, models: Models) -> None:
    """A stop without grace aborts open sessions with open streams, and changes nothing."""
    before = all_bits(models[0])
    server = start(*models)
    go = threading.Event()
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)

        def endless() -> Iterator[weight_sync_pb2.UpdateWeightsRequest]:
            while not go.is_set():
                yield chunk(session, VERIFIER, {"fc.weight": torch.ones(4, 4)})

        call = trainer.stub.UpdateWeights.future(endless(), timeout=60)
        while not trainer.session(session).session.received_bytes:
            pass
        server.stop(0.0)
        assert call.exception() is not None
        go.set()
    assert all_bits(models[0]) == before
    assert models[0](torch.tensor([1])).shape == (1, 10)


def test_a_unix_socket_goes_with_its_server(start: Start, models: Models, tmp_path: Path) -> None:
    """The socket file is removed at the stop, and the path can be used again."""
    address = f"unix://{tmp_path}/run/worker one.sock"
    for _ in range(2):
        server = start(*models, address=address)
        with RawTrainer(server.address) as trainer:
            assert trainer.worker().targets
        server.stop(0.0)
        assert not (tmp_path / "run" / "worker one.sock").exists()


def exit_at_once() -> None:
    """Do nothing, in a child process."""


def test_a_forked_child_does_not_hurt_the_server(start: Start, models: Models) -> None:
    """An engine that forks and runs programs while it serves goes on serving (B82)."""
    server = start(*models)
    with RawTrainer(server.address) as trainer:
        session = trainer.start(VERIFIER)
        child = multiprocessing.get_context("fork").Process(target=exit_at_once)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        subprocess.run([sys.executable, "-c", ""], check=True, timeout=60)
        trainer.push(session, VERIFIER, noise(models[0]))
        trainer.finish(session)


SERVE = """
import sys, torch, weightsync
from weightsync.testing.models import tiny_pair
server = weightsync.serve(*tiny_pair(), address=sys.argv[1])
print(server.address, flush=True)
"""


def test_a_process_ends_without_a_stop() -> None:
    """A program that forgets to stop its server ends all the same."""
    assert run(SERVE, "127.0.0.1:0").stdout.startswith("127.0.0.1:")


def test_a_watched_process_ends_without_a_stop() -> None:
    """Clients that are connected do not keep a worker's process alive."""
    program = SERVE + "sys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", program, "127.0.0.1:0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        with RawTrainer(process.stdout.readline().strip()) as trainer:
            events = trainer.stub.WatchWorker(weight_sync_pb2.WatchWorkerRequest(), timeout=60)
            next(events)
            trainer.start(VERIFIER)
            process.stdin.close()
            assert process.wait(60) == 0
            with pytest.raises(grpc.RpcError):
                list(events)


def test_a_killed_server_is_replaced_on_its_socket(tmp_path: Path) -> None:
    """After a SIGKILL the next server takes the same socket, under another identity (B84)."""
    address = f"unix://{tmp_path}/worker.sock"
    identities = set()
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", SERVE + "sys.stdin.read()\n", address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            with RawTrainer(process.stdout.readline().strip()) as trainer:
                identities.add(trainer.worker().instance_id)
            process.send_signal(signal.SIGKILL)
    assert len(identities) == 2


TRAIN = """
import sys
from tests.integration.raw import *
from weightsync.testing.models import Tiny
trainer = RawTrainer(sys.argv[1])
session = trainer.start(VERIFIER, lease={"nanos": 500_000_000})
def messages():
    while True:
        yield chunk(session, VERIFIER, {"fc.weight": torch.ones(4, 4)})
call = trainer.stub.UpdateWeights.future(messages())
print(session, flush=True)
call.result()
"""


def test_a_killed_trainer_frees_the_target(start: Start) -> None:
    """A trainer killed in the middle of its stream leaves the old weights and, soon, no session."""
    verifier, _ = tiny_pair()
    before = all_bits(verifier)
    server = start(verifier)
    with RawTrainer(server.address) as trainer:
        events = trainer.stub.WatchWorker(weight_sync_pb2.WatchWorkerRequest(), timeout=60)
        next(events)
        with subprocess.Popen(
            [sys.executable, "-c", TRAIN, server.address], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            session = process.stdout.readline().strip()
            while not trainer.session(session).session.received_bytes:
                pass
            process.send_signal(signal.SIGKILL)
        assert next(events).kind == weight_sync_pb2.WatchWorkerResponse.KIND_STARTED
        assert next(events).kind == weight_sync_pb2.WatchWorkerResponse.KIND_EXPIRED
        assert all_bits(verifier) == before
        new = noise(verifier)
        session = trainer.start(VERIFIER)
        trainer.push(session, VERIFIER, new)
        trainer.finish(session)
    assert all_bits(verifier) == {name: bits(t) for name, t in new.items()}
