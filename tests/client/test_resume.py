from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from weightsync_client import (  # noqa: E402
    ConnectionLostError,
    DeadlineError,
    Fleet,
    SendOptions,
    Worker,
    verify,
)

from tests.client.live import Proxy  # noqa: E402
from weightsync.core.errors import UnknownSessionError, WeightSyncError  # noqa: E402
from weightsync.core.trace import Trace  # noqa: E402
from weightsync.core.types import Scope  # noqa: E402
from weightsync.server.serve import serve  # noqa: E402

SIZE = 1 << 20
NUM_TENSORS = 12


def make(fill: int) -> nn.ParameterList:
    """Return a model of 12 MiB; every element of it depends on the fill."""
    base = torch.arange(SIZE // 4, dtype=torch.int32)
    return nn.ParameterList(
        nn.Parameter((base * (i + 7) + fill).view(torch.float32), requires_grad=False)
        for i in range(NUM_TENSORS)
    )


@dataclass
class Line:
    """A served model behind a connection that can be cut."""

    model: nn.Module
    proxy: Proxy
    received: list[object]
    direct: str

    def fleet(self, *, timeout: float = 30.0) -> Fleet:
        """Return the worker as the client sees it."""
        return Fleet([Worker(self.proxy.address, timeout=timeout)])


@pytest.fixture
def line() -> Iterator[Line]:
    """Serve a model behind a proxy."""
    model = make(0)
    received: list[object] = []
    trace = Trace(lambda name, facts: received.append(facts) if name == "chunk.completed" else None)
    with serve(model, trace=trace, shared_memory=False) as server:
        proxy = Proxy(server.address)
        yield Line(model, proxy, received, server.address)
        proxy.close()
        server.stop(grace=0)  # Some sessions are left open on purpose.


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("window", [2 << 20, 64 << 20])
@pytest.mark.parametrize("after", [1000, 3 << 20, (11 << 20) + 12345])
def test_a_cut_connection_costs_nothing_but_time(
    line: Line, scope: Scope, window: int, after: int
) -> None:
    """B65: cut at any byte, the push goes on from what is missing, whatever the source was."""
    source = make(1)
    options = SendOptions(chunk_bytes=1 << 18, window_bytes=window)
    with line.fleet() as fleet, fleet.update(version="v1", scope=scope, options=options) as session:
        line.proxy.cut_after(after)
        session.push(iter(source.state_dict().items()))
    assert line.proxy.connections > 1
    assert session.report.committed
    assert verify(line.direct, source).equal


def test_only_what_is_missing_goes_again(line: Line) -> None:
    """Of a full session the worker is sent nothing that it has, but for one message's worth."""
    options = SendOptions(chunk_bytes=1 << 18)
    with line.fleet() as fleet, fleet.update(version="v1", options=options) as session:
        line.proxy.cut_after(8 << 20)
        session.push(make(1))
    needed = NUM_TENSORS * SIZE // (1 << 18)
    assert needed <= len(line.received) <= needed + 2


def test_several_cuts_are_survived(line: Line) -> None:
    """Each lost connection is replaced, as long as the session lives."""
    source = make(1)
    options = SendOptions(chunk_bytes=1 << 18, window_bytes=4 << 20)
    with line.fleet() as fleet, fleet.update(version="v1", options=options) as session:
        for tensor in source.state_dict().items():
            line.proxy.cut()
            session.push([tensor])
    assert verify(line.direct, source).equal


def test_a_session_that_is_gone_is_no_lost_connection(line: Line) -> None:
    """A worker that does not know the session any more is told as such; nothing goes on."""
    before = verify(line.direct, make(0)).equal
    with line.fleet() as fleet:
        session = fleet.update(version="v1")
        with serve(make(2)) as other:
            line.proxy.redirect(other.address)
            line.proxy.cut()

            def push() -> None:
                session.push(make(1))
                session.settle()

            with pytest.raises(UnknownSessionError):
                push()
    assert before
    assert verify(line.direct, make(0)).equal


def test_a_worker_that_stays_away_is_an_error_in_time(line: Line) -> None:
    """B56: nobody waits for ever: the error comes once the patience is over."""
    options = SendOptions(patience=0.5)
    session = line.fleet(timeout=1.0).update(version="v1", options=options)
    line.proxy.close()

    def push() -> None:
        session.push(make(1))
        session.settle()

    with pytest.raises((ConnectionLostError, DeadlineError)):
        push()
    assert verify(line.direct, make(0)).equal


def test_a_worker_that_takes_nothing_is_an_error_in_time(line: Line) -> None:
    """B86: no deadline is over the whole stream, but silence has a limit."""
    session = line.fleet(timeout=0.5).update(version="v1", options=SendOptions(patience=0.5))
    line.proxy.stall()

    def push() -> None:
        for _ in range(100):
            session.push(make(1))
        session.settle()

    with pytest.raises(DeadlineError):
        push()


def test_another_process_at_the_address_is_noticed(line: Line) -> None:
    """A client that expects an instance refuses to talk to any other."""
    with Worker(line.direct) as worker:
        known = worker.info().instance_id
    with Worker(line.direct, instance_id=known) as worker:
        assert worker.info().instance_id == known
    with Worker(line.direct, instance_id="another") as worker, pytest.raises(WeightSyncError):
        worker.info()
