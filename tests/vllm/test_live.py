from __future__ import annotations

import itertools
import threading
from pathlib import Path

from vllm import LLM
from weightsync_client import Fleet

from tests.vllm import checkpoints
from tests.vllm.engine import PROMPTS, address_of, generate, running, worker_of

UPDATES = 50


def one_step(llm: LLM) -> str:
    """Return the next token of each prompt, which is one step of the engine."""
    return str(generate(llm, PROMPTS, num_tokens=1))


def test_no_step_sees_two_versions(llama: Path, new: checkpoints.Tensors, weights: str) -> None:
    """While versions alternate under load, each step's tokens are those of one version."""
    versions = [new, checkpoints.values(checkpoints.shapes(checkpoints.LLAMA), 1)]
    with running(llama) as llm, Fleet([address_of(llm)]) as fleet:
        allowed = {one_step(llm)}
        update(fleet, new)
        allowed.add(one_step(llm))
        done = threading.Event()

        def trainer() -> None:
            try:
                for tensors, _ in zip(itertools.cycle(versions), range(UPDATES), strict=False):
                    update(fleet, tensors)
            finally:
                done.set()

        thread = threading.Thread(target=trainer)
        thread.start()
        seen = set()
        while not done.is_set():
            seen.add(one_step(llm))
        thread.join()
        assert seen == allowed
        assert fleet.workers[0].info().targets[0].num_commits == UPDATES + 1


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
