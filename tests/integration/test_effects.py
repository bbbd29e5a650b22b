"""What an update does not do: break requests, or care how its bytes are grouped."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.integration.raw import DRAFT, VERIFIER, RawTrainer, all_bits, chunk, noise
from weightsync.testing.models import Tiny

Models = tuple[Tiny, Tiny]


def test_a_running_request_goes_on_over_a_commit(trainer: RawTrainer, models: Models) -> None:
    """B64: a request of many steps loses none of them when a new version goes live between two."""
    verifier, _ = models
    between, resume = threading.Event(), threading.Event()

    def request() -> int:
        steps = 0
        for step in range(20):
            if step == 10:
                between.set()
                assert resume.wait(60)
            assert verifier(torch.tensor([step % 10])).isfinite().all()
            steps += 1
        return steps

    with ThreadPoolExecutor() as pool:
        running = pool.submit(request)
        assert between.wait(60)
        session = trainer.start(VERIFIER)
        trainer.push(session, VERIFIER, noise(verifier))
        trainer.finish(session)
        assert not running.done()
        resume.set()
        assert running.result(60) == 20


def test_completeness_is_judged_at_the_end(trainer: RawTrainer, models: Models) -> None:
    """B15: one tensor per message, the draft's last, and messages with none of it: all is fine."""
    verifier, draft = models
    new, own = noise(verifier), noise(draft, seed=2)
    own = {name: own[name] for name in own if name not in ("embed.weight", "head.weight")}
    session = trainer.start(VERIFIER, DRAFT)
    trainer.push(session, VERIFIER, new)
    trainer.send([chunk(session, VERIFIER, {})])
    trainer.push(session, DRAFT, own)
    trainer.finish(session)
    want = {name: tensor.numpy().tobytes() for name, tensor in new.items()}
    assert all_bits(verifier) == want
    assert all_bits(draft) == want | {n: t.numpy().tobytes() for n, t in own.items()}
