"""What it costs to have many small tensors: 78 MiB in 20,000 of them, beside the same in 200."""

from __future__ import annotations

from contextlib import ExitStack, closing

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.models import make
from benchmarks.process import peer
from benchmarks.push import Push
from benchmarks.samples import Row

ROUNDS = 3


def test_small_tensors(benchmark: BenchmarkFixture, rows: list[Row]) -> None:
    """Pushes of both models, interleaved; how long it takes to learn what the worker needs."""
    with ExitStack() as stack:
        few, small = (
            stack.enter_context(
                closing(Push(name, make(form), stack.enter_context(peer("worker", form))))
            )
            for name, form in (("push, 200 tensors", "few"), ("push, 20,000 tensors", "small"))
        )
        few()
        small()
        for samples in (*few.samples, *small.samples):
            samples.clear()
        benchmark.pedantic(small, setup=few, rounds=ROUNDS)  # type: ignore[no-untyped-call]
        small.verify()
    rows += [few.whole.row(), small.whole.row(few.whole), small.opening.row(few.opening)]
    rows.append(small.pause.row(few.pause))
