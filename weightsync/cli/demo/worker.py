"""The worker: generates text with both models all the time, whatever is pushed into it."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import weightsync
from weightsync.cli.demo.events import Generated, LeftBehind, Listening, Measured
from weightsync.cli.demo.models import left_behind
from weightsync.cli.demo.plan import Plan
from weightsync.cli.demo.text import corpus, prompt, readable
from weightsync.core.types import Target
from weightsync.engines.transformers import Generation, TransformersEngine
from weightsync.loader import LoadedPair, load_pair
from weightsync.server.server import Server

_PROMPT_TOKENS = 24
_TEMPERATURE = 0.7


def run(connection: Connection, plan: Plan) -> None:
    """Serve the trainer's checkpoints and generate until `Stop`, then measure once more."""
    folder = Path(connection.recv().folder)
    pair = load_pair(folder / "verifier", folder / "draft")
    engine = TransformersEngine(pair.verifier, pair.draft)
    with weightsync.serve(engine=engine) as server:
        connection.send(Listening(server.address, pair.report.render()))
        writer = Writer(server, engine, pair, plan)
        while not connection.poll():
            for event in writer.write(plan):
                connection.send(event)
        connection.recv()
        connection.send(writer.measure(plan))


class Writer:
    """Writes with the draft that gets updates and, later, with a copy that gets none as well."""

    def __init__(
        self, server: Server, engine: TransformersEngine, pair: LoadedPair, plan: Plan
    ) -> None:
        """Begin with the one draft."""
        self._server = server
        self._pair = pair
        self._engines = {True: engine}
        self._text = corpus()
        self._generator = torch.Generator().manual_seed(plan.seed)

    def write(self, plan: Plan) -> list[Generated | LeftBehind]:
        """Continue one prompt with the help of each draft."""
        events: list[Generated | LeftBehind] = []
        if False not in self._engines and self._num_commits() >= plan.left_behind_after:
            self._leave_behind()
            events.append(LeftBehind(time.time(), self._version()))
        start = prompt(self._text, _PROMPT_TOKENS, self._generator)
        for updated in self._engines:
            found = self._generate(start, plan.sample_tokens, updated=updated)
            events.append(
                Generated(
                    time.time(),
                    self._version(),
                    updated,
                    readable(start),
                    readable(list(found.tokens)),
                    found.proposed,
                    found.accepted,
                )
            )
        return events

    def measure(self, plan: Plan) -> Measured:
        """Compare the drafts on the same prompts."""
        if False not in self._engines:
            self._leave_behind()
        starts = [
            prompt(self._text, _PROMPT_TOKENS, self._generator) for _ in range(plan.final_samples)
        ]
        shares = {}
        for updated in (True, False):
            torch.manual_seed(plan.seed)
            found = [self._generate(s, plan.sample_tokens, updated=updated) for s in starts]
            shares[updated] = sum(g.accepted for g in found) / sum(g.proposed for g in found)
        return Measured(shares[True], shares[False])

    def _generate(self, start: list[int], num_tokens: int, *, updated: bool) -> Generation:
        return self._engines[updated].generate(
            start, max_new_tokens=num_tokens, do_sample=True, temperature=_TEMPERATURE, top_k=0
        )

    def _leave_behind(self) -> None:
        engine = self._engines[True]
        with engine.gate.exclusive(timeout=10.0):
            copy = left_behind(self._pair.verifier, self._pair.draft)
        # It reads the verifier's embedding, so commits must wait for it as well.
        engine.gate.attach(copy, Target.DRAFT)
        self._engines[False] = TransformersEngine(self._pair.verifier, copy)

    def _num_commits(self) -> int:
        return max(held.num_commits for held in self._server.worker.info().targets)

    def _version(self) -> str:
        return self._server.worker.info().targets[0].weight_version
