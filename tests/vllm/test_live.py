from __future__ import annotations

import threading
from pathlib import Path

from vllm import LLM
from weightsync_client import Fleet

from tests.vllm import checkpoints
from tests.vllm.engine import PROMPTS, address_of, generate, running, worker_of


def one_step(llm: LLM) -> str:
    """Return the next token of each prompt, which is one step of the engine."""
    return str(generate(llm, PROMPTS, num_tokens=1))


def test_requests_in_flight_are_kept(llama: Path) -> None:
    """Updates in the middle of requests reset the cache; with equal weights no token changes."""
    same = checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 1)
    cached = {"enable_prefix_caching": True, "block_size": 32}
    with running(llama, **cached) as llm, Fleet([address_of(llm)]) as fleet:
        undisturbed = generate(llm, num_tokens=100)
        started = fleet.workers[0].info().targets[0].num_commits
        done = threading.Event()

        def trainer() -> None:
            while not done.is_set():
                update(fleet, same)

        thread = threading.Thread(target=trainer)
        thread.start()
        disturbed = generate(llm, num_tokens=100)
        done.set()
        thread.join()
        assert fleet.workers[0].info().targets[0].num_commits > started
        assert disturbed == undisturbed


def update(fleet: Fleet, tensors: checkpoints.Tensors) -> None:
    """Commit all tensors."""
    with fleet.update(version="next") as session:
        session.push(tensors)
        session.finish()


def test_a_paused_worker_makes_no_step(llama: Path, new: checkpoints.Tensors) -> None:
    """A request that comes between pause and resume waits, and sees what was committed then."""
    with running(llama) as llm, Fleet([address_of(llm)]) as fleet:
        switch = worker_of(llm).weight_transfer_engine.server.worker.switch
        before = one_step(llm)
        paused = threading.Event()

        def trainer() -> None:
            switch.pause()
            paused.set()
            try:
                update(fleet, new)
            finally:
                switch.resume()

        thread = threading.Thread(target=trainer)
        thread.start()
        paused.wait()
        waited = one_step(llm)
        thread.join()
        assert waited == one_step(llm) != before
