"""A push of 1 GiB over loopback, beside what the machine can do at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from weightsync_client import Fleet, Session, verify

from benchmarks.models import make, nbytes
from benchmarks.process import Peer, peer
from benchmarks.samples import Row, Samples
from benchmarks.yardsticks import Memcpy, Tcp, parameter_bytes
from weightsync.core.types import UpdateMode

ROUNDS = 5


class Push:
    """Pushes of a module to one worker, and what they took."""

    def __init__(
        self, name: str, module: nn.Module, worker: Peer, mode: UpdateMode = UpdateMode.STAGED
    ) -> None:
        """Connect to a worker that serves a module of the same form."""
        size = nbytes(module)
        self.whole = Samples(name, size)
        self.transfer = Samples(f"{name}: transfer", size)
        self.pause = Samples(f"{name}: commit pause", size)
        self._module, self._worker, self._mode = module, worker, mode
        self._fleet = Fleet([worker.said])

    @property
    def samples(self) -> tuple[Samples, ...]:
        """All that is measured."""
        return self.whole, self.transfer, self.pause

    def __call__(self) -> None:
        """Push once: from the first call until all bytes are live and acknowledged."""
        session = self.whole.take(self._push, os.getpid(), self._worker.pid)
        commit = session.report.workers[0].commit
        assert commit is not None
        self.pause.seconds.append(commit.pause_seconds)

    def _push(self) -> Session:
        with self._fleet.update(target="verifier", version="next", mode=self._mode) as session:
            self.transfer.take(lambda: self._transfer(session))
        return session

    def _transfer(self, session: Session) -> None:
        session.push(self._module)
        session.settle()

    def verify(self) -> None:
        """Check that the worker holds what was pushed."""
        assert verify(self._fleet, self._module).equal

    def close(self) -> None:
        """Close the connection."""
        self._fleet.close()


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """Return the sender's model."""
    return make("mixed")


@pytest.fixture
def pushes(module: nn.Module) -> Iterator[list[Push]]:
    """Connect to three workers: as they come, with spare staging memory, and one for IN_PLACE."""
    with ExitStack() as stack:
        size = nbytes(module)
        plain, keeping = (
            stack.enter_context(peer("worker", "mixed", str(spare))) for spare in (0, 2 * size)
        )
        yield [
            stack.enter_context(closing(push))
            for push in (
                Push("push", module, plain),
                Push("push, arena kept", module, keeping),
                Push("push IN_PLACE", module, plain, UpdateMode.IN_PLACE),
            )
        ]


def test_push(
    benchmark: BenchmarkFixture, module: nn.Module, pushes: list[Push], rows: list[Row]
) -> None:
    """Rounds of memcpy, raw TCP and pushes, interleaved; ratios are taken within a round."""
    arrays, size, me = parameter_bytes(module), nbytes(module), os.getpid()
    one, two = Samples("memcpy, 1 thread", size), Samples("memcpy, 2 threads", size)
    tcp = Samples("raw TCP", size)
    plain, *others = pushes
    with peer("tcp_peer", str(size)) as receiver, closing(Tcp(arrays, int(receiver.said))) as send:
        copies = [(one, Memcpy(arrays, 1)), (two, Memcpy(arrays, 2))]

        def beside() -> None:
            for samples, copy in copies:
                samples.take(copy, me)
            tcp.take(send, me, receiver.pid)
            for push in others:
                push()

        # The first round warms up: connections, pages, caches.
        beside()
        plain()
        for samples in (one, two, tcp, *chain.from_iterable(push.samples for push in pushes)):
            samples.clear()
        benchmark.pedantic(plain, setup=beside, rounds=ROUNDS)  # type: ignore[no-untyped-call]
    for push in pushes:
        push.verify()
    rows += [one.row(), two.row(), tcp.row(two)]
    for push in pushes:
        rows += [push.whole.row(tcp), push.transfer.row(tcp), push.whole.row(push.transfer)]
        rows.append(push.pause.row(two))
