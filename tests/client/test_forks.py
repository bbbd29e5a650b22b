"""A trainer that forks goes on, and its children are told instead of waiting for ever (B82)."""

from __future__ import annotations

import torch

import weightsync
from tests.integration.process import run

PRELUDE = """
import contextlib, os, signal, sys, warnings
import numpy as np
from weightsync_client import Fleet, Worker
from weightsync.core.errors import UnsupportedError

# Of Python 3.12 and later, and just what is tried here.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
address = os.environ["ADDRESS"]
ones = {"big": np.ones(1024, np.uint8)}

def refused(call):
    try:
        call()
    except UnsupportedError as error:
        return "fork" in str(error)
    return False

def reaped(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def served() -> weightsync.Server:
    """Serve one tensor."""
    model = torch.nn.Module()
    model.register_buffer("big", torch.zeros(1024, dtype=torch.uint8))
    return weightsync.serve(model)


def test_a_child_is_refused_and_the_parent_goes_on() -> None:
    """Each call in a forked child fails at once; the parent's session is finished by the parent."""
    with served() as server:
        told = run(
            PRELUDE
            + """
with Fleet([address]) as fleet, fleet.update(version="v1") as session:
    worker = fleet.workers[0]
    session.push(ones)
    events = worker.watch()
    next(events)
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        calls = [
            lambda: worker.info(), lambda: list(worker.tensors()), lambda: next(events),
            lambda: fleet.update(version="v2"), lambda: fleet.workers[0].control.pause(),
            lambda: session.push(ones), session.settle, session.finish, session.abort,
            lambda: Worker(address), lambda: Fleet([address]),
        ]
        sys.exit(sum(map(refused, calls)) + 100 * len(calls))  # through all of the blocks' ends
    code = reaped(pid)
    events.close()
tell(code=code, expected=(11 + 100 * 11) % 256, version=session.report.weight_version)
""",
            ADDRESS=server.address,
        )
        assert told["code"] == told["expected"]
        assert told["version"] == "v1"
        (status,) = server.worker.info().targets
        assert (status.weight_version, status.session_id) == ("v1", "")


def test_forks_at_any_moment_hang_nobody() -> None:
    """B82: children that are forked while other threads are inside gRPC end, as does the parent."""
    with served() as server:
        told = run(
            PRELUDE
            + """
fleet = Fleet([address])
over = threading.Event()

def ask():
    while not over.is_set():
        fleet.workers[0].info()

threads = [threading.Thread(target=ask) for _ in range(2)]
for thread in threads:
    thread.start()
codes = []
for index in range(20):
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        sys.exit(3 if refused(fleet.workers[0].info) else 4)
    codes.append(reaped(pid))
over.set()
for thread in threads:
    thread.join()
instance = fleet.workers[0].info().instance_id
fleet.close()
tell(codes=codes, instance=instance)
""",
            ADDRESS=server.address,
        )
        assert told == {"codes": [3] * 20, "instance": server.worker.instance_id}


def test_a_data_loader_forks_beside_a_session() -> None:
    """Workers of torch's DataLoader load what the trainer pushes while its session is open."""
    with served() as server:
        told = run(
            PRELUDE
            + """
import torch
from torch.utils.data import DataLoader, Dataset

class Batches(Dataset):
    def __init__(self, fleet):
        self.fleet = fleet

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert refused(self.fleet.workers[0].info)
        return torch.full((128,), index, dtype=torch.uint8)

torch.set_num_threads(1)
with Fleet([address]) as fleet, fleet.update(version="v1") as session:
    loader = DataLoader(
        Batches(fleet), batch_size=8, num_workers=2, multiprocessing_context="fork"
    )
    (batch,) = loader
    session.push({"big": batch.reshape(-1)})
tell(version=session.report.weight_version)
""",
            ADDRESS=server.address,
        )
        assert told["version"] == "v1"
        assert server.worker.info().targets[0].weight_version == "v1"


def test_a_child_that_was_forked_before_may_connect() -> None:
    """Who forks before the first connection pays nothing for it, in parent and child."""
    with served() as server:
        told = run(
            PRELUDE
            + """
pid = os.fork()
if not pid:
    signal.alarm(60)
with Worker(address) as worker:
    instance = worker.info().instance_id
if not pid:
    sys.exit(0)
tell(code=reaped(pid), instance=instance)
""",
            ADDRESS=server.address,
        )
        assert told == {"code": 0, "instance": server.worker.instance_id}
