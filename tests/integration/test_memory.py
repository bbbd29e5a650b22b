"""Memory is bounded by the session's bytes and a few chunks, on both ends, for ever."""

from __future__ import annotations

import pytest
import torch

import weightsync
from tests.integration.process import run

MIB = 1 << 20

SERVE = """
import numpy as np
import torch
import weightsync
from weightsync_client import Fleet, SendOptions, connect, push_model
from weightsync.core.types import Scope, UpdateMode

torch.set_num_threads(1)
MIB = 1 << 20

def model_of(nbytes):
    model = torch.nn.Module()
    model.register_buffer("big", torch.ones(nbytes, dtype=torch.uint8))
    return model
"""


def served(nbytes: int) -> weightsync.Server:
    """Serve one tensor."""
    model = torch.nn.Module()
    model.register_buffer("big", torch.ones(nbytes, dtype=torch.uint8))
    return weightsync.serve(model, shared_memory=False)


def test_a_sender_needs_a_few_chunks_only() -> None:
    """B73, B88: however large a tensor, the sender's peak rises by what is unacknowledged."""
    with served(256 * MIB) as server:
        told = run(
            """
import os
import numpy as np
from weightsync_client import SendOptions, push_model
MIB = 1 << 20
big = np.full(256 * MIB, 7, np.uint8)
before = rss()
forget_peak()
push_model(os.environ["ADDRESS"], {"big": big}, version="v1",
           options=SendOptions(window_bytes=16 * MIB))
tell(rise=peak() - before)
""",
            ADDRESS=server.address,
        )
    assert told["rise"] < 64 * MIB


def test_a_view_sends_itself_and_not_its_storage() -> None:
    """B73, B22: a small slice of a large storage is sent, and kept, as the small thing it is."""
    with served(1024) as server:
        told = run(
            """
import os
import torch
from weightsync_client import push_model
MIB = 1 << 20
storage = torch.zeros(400 * MIB, dtype=torch.uint8)
before = rss()
forget_peak()
report = push_model(os.environ["ADDRESS"], {"big": storage[5000:6024]}, version="v1")
tell(rise=peak() - before, sent=report.sent_bytes)
""",
            ADDRESS=server.address,
        )
    assert told["sent"] == 1024
    assert told["rise"] < 40 * MIB


def test_a_worker_needs_the_session_and_a_few_chunks() -> None:
    """B88: a STAGED session costs the worker its own bytes once, an IN_PLACE one a few chunks."""
    told = run(
        SERVE
        + """
from weightsync.core.malloc import tune_malloc
tune_malloc()  # as `weightsync serve` does: else what each thread has freed counts as used
size = 128 * MIB
model = model_of(size)
rises = {}
with weightsync.serve(model, shared_memory=False) as server:
    new = np.full(size, 7, np.uint8)
    for mode in UpdateMode:
        push_model(server.address, {"big": new}, version="warm", mode=mode)
        before = rss()
        forget_peak()
        push_model(server.address, {"big": new}, version="v1", mode=mode,
                   options=SendOptions(window_bytes=16 * MIB))
        rises[mode.name] = peak() - before
tell(**rises)
"""
    )
    assert told["STAGED"] < (128 + 72) * MIB
    assert told["IN_PLACE"] < 72 * MIB


@pytest.mark.slow
def test_hundreds_of_sessions_leave_memory_flat() -> None:
    """B74, B16: after 300 sessions of both ends, committed and aborted, memory is where it was."""
    told = run(
        SERVE
        + """
size = 4 * MIB
model = model_of(size)
new = [np.full(size, fill, np.uint8) for fill in (1, 2)]

def update(fleet, step):
    session = fleet.update(version=str(step))
    session.push({"big": new[step % 2]})
    if step % 3:
        session.finish()
    else:
        session.settle()
        session.abort()

with weightsync.serve(model, shared_memory=False) as server, Fleet([server.address]) as fleet:
    for step in range(30):
        update(fleet, step)
    before, threads = rss(), threading.active_count()
    for step in range(300):
        update(fleet, step)
    tell(rise=rss() - before, threads=threading.active_count() - threads)
"""
    )
    assert told["rise"] < 32 * MIB
    # A few are just beginning or ending.
    assert told["threads"] < 10


def test_a_long_stream_keeps_no_messages() -> None:
    """B80: 10 000 chunks of one stream leave memory flat on both ends."""
    told = run(
        SERVE
        + """
size = 10 * MIB
model = model_of(size)
new = np.full(size, 7, np.uint8)
options = SendOptions(chunk_bytes=1024, window_bytes=1 << 40)
with weightsync.serve(model, shared_memory=False) as server, Fleet([server.address]) as fleet:
    session = fleet.update(version="warm", options=options)
    session.push({"big": new})
    session.finish()
    before = rss()
    seen = []
    def watch(progress):
        if progress.bytes_done in (2 * MIB, 10 * MIB):
            seen.append(rss())
    session = fleet.update(version="v1", options=options, progress=watch)
    session.push({"big": new})
    report = session.finish()
tell(chunks=report.sent_bytes // 1024, rise=seen[1] - seen[0])
"""
    )
    assert told["chunks"] == 10 * 1024
    # The payload itself is unacknowledged until the stream ends, and the arena fills.
    assert told["rise"] < 48 * MIB
