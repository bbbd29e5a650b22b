"""A push of 1 GiB over loopback, beside what the machine can do at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from benchmarks.models import make, nbytes
from benchmarks.process import peer
from benchmarks.push import Push
from benchmarks.samples import Row, Samples
from benchmarks.yardsticks import Memcpy, Tcp, parameter_bytes
from weightsync.core.types import Transport, UpdateMode

ROUNDS = 5


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """Return the sender's model."""
    return make("mixed")


@pytest.fixture
def pushes(module: nn.Module) -> Iterator[list[Push]]:
    """Connect to two workers: one as it comes, one that keeps its staging memory."""
    with ExitStack() as stack:
        size = nbytes(module)
        plain, keeping = (
            stack.enter_context(peer("worker", "mixed", str(spare))) for spare in (0, 3 * size)
        )
        yield [
            stack.enter_context(closing(push))
            for push in (
                Push("push", module, plain),
                Push("push, arena kept", module, keeping),
                Push("push IN_PLACE", module, plain, UpdateMode.IN_PLACE),
                Push("shared memory", module, keeping, transport=Transport.SHARED_MEMORY),
                Push(
                    "shared memory, computed there",
                    module,
                    keeping,
                    transport=Transport.SHARED_MEMORY,
                    computed=True,
                ),
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
        if push.transport is Transport.SHARED_MEMORY:
            rows.append(push.whole.row(two))
            continue
        rows += [push.whole.row(tcp), push.transfer.row(tcp)]
        rows.append(push.whole.row(push.transfer, f"{push.whole.name}: beside its transfer"))
    # IN_PLACE holds forward passes from start to finish: it has no pause of its own.
    rows += [push.pause.row(two) for push in pushes if push.mode is UpdateMode.STAGED]
