"""Few bytes can cut a tensor into very many boxes; the work for them is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.worker.feeding import Piece, request, send, state, unchanged
from weightsync.arena import claim
from weightsync.core.dtypes import DType
from weightsync.core.errors import InvalidRequestError
from weightsync.core.regions import Region
from weightsync.core.types import Scope, Segment, SessionState, Target
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker

SIDE = 4096
SHAPE = (SIDE, SIDE)


@pytest.fixture
def model() -> nn.Module:
    """One square of 16 MiB."""
    model = nn.Module()
    model.register_buffer("square", torch.zeros(SHAPE, dtype=torch.uint8))
    return model


@pytest.fixture
def worker(model: nn.Module) -> Iterator[Worker]:
    """A worker of the square, whose weights no test here may change."""
    before = state(model)
    worker = Worker(ModuleEngine(model))
    yield worker
    worker.close()
    assert unchanged(model, before)


def box(top: int, left: int, height: int, width: int) -> Piece:
    """Return a region of the square, full of ones."""
    size = height * width
    region = Region((top, left), (height, width))
    segment = Segment(Target.VERIFIER, "square", DType.UINT8, SHAPE, region, 0, size)
    return segment, memoryview(b"\1" * size)


ROWS = [box(row, 0, 1, 512) for row in range(0, SIDE, 2)]
COLUMNS = [box(0, column, SIDE, 1) for column in range(0, 512, 2)]


def refused(worker: Worker, session_id: str, message: list[Piece]) -> None:
    """Send a message that must be refused as cut too finely, and taken in no part."""
    before = worker.update(session_id).missing_bytes
    with pytest.raises(InvalidRequestError, match="too finely") as caught:
        send(worker, session_id, [message])
    assert caught.value.subjects == ("segments.region",)
    after = worker.update(session_id)
    assert (after.missing_bytes, after.state) == (before, SessionState.OPEN)


def test_rows_that_cross_columns_are_refused(worker: Worker) -> None:
    """What would lie in half a million boxes is refused; the session takes the rest."""
    session = worker.start(request())
    send(worker, session.session_id, [ROWS])
    refused(worker, session.session_id, COLUMNS)
    (missing,), _ = worker.missing(session.session_id, 0, 10)
    assert len(missing.regions) <= 2 * claim.MAX_BOXES
    send(worker, session.session_id, [[box(512 * part, 0, 512, SIDE)] for part in range(8)])
    assert worker.update(session.session_id).missing_bytes == 0


def test_both_in_one_message_are_refused(worker: Worker) -> None:
    """It does not help to send rows and columns together, in whichever order."""
    session = worker.start(request())
    rows, columns = ROWS[::8], COLUMNS[::4]
    refused(worker, session.session_id, [*rows, *columns])
    refused(worker, session.session_id, [*columns, *rows])


def test_a_message_of_single_bytes_is_refused(worker: Worker) -> None:
    """Very many segments, each of one byte apart from the others."""
    session = worker.start(request(scope=Scope.PARTIAL))
    dust = [box(2 * (i // 2048), 2 * (i % 2048), 1, 1) for i in range(9000)]
    refused(worker, session.session_id, dust)


def test_the_same_crossing_again_and_again_is_refused(worker: Worker) -> None:
    """Bytes that are there already make work too: each box is compared."""
    session = worker.start(request())
    send(worker, session.session_id, [ROWS, [box(0, 600, SIDE, 1)]])
    refused(worker, session.session_id, [box(0, 600, SIDE, 1)] * 60)


def test_many_small_regions_are_no_attack(worker: Worker) -> None:
    """Single rows in any order, such as those of the tokens of a batch, are taken."""
    session = worker.start(request(scope=Scope.PARTIAL))
    order = torch.randperm(SIDE, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [box(row, 0, 1, 256) for row in order[:2000]]
    send(worker, session.session_id, [rows[:1000], rows[1000:]])
    page, _ = worker.missing(session.session_id, 0, 10)
    assert page == []


def test_messages_of_many_segments_share_a_storage(worker: Worker) -> None:
    """Two streams that write thousands of regions into one tensor do not wait for ever."""
    session = worker.start(request())
    halves = [
        [box(row, 16 * column + 8 * half, 1, 8) for row in range(10) for column in range(256)]
        for half in range(2)
    ]
    threads = [
        threading.Thread(target=send, args=(worker, session.session_id, [half])) for half in halves
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worker.update(session.session_id).missing_bytes == SIDE * (SIDE - 10)
