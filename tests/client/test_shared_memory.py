"""Bytes that a client writes into the worker's arena itself."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from weightsync_client import Fleet, SendOptions, verify  # noqa: E402
from weightsync_client.sources.torch_array import to_torch  # noqa: E402

from tests.client.live import bits, tiny  # noqa: E402
from weightsync.arena.handover import MAX_CLIENTS  # noqa: E402
from weightsync.core.dtypes import DType  # noqa: E402
from weightsync.core.errors import (  # noqa: E402
    SessionStateError,
    UnknownTensorError,
    UnsupportedError,
)
from weightsync.core.regions import Region  # noqa: E402
from weightsync.core.types import (  # noqa: E402
    CastPolicy,
    ChecksumType,
    Limits,
    Scope,
    Segment,
    Target,
    Transport,
    UpdateMode,
)
from weightsync.server.serve import serve  # noqa: E402
from weightsync.server.server import Server  # noqa: E402
from weightsync.v1 import weight_sync_pb2 as pb  # noqa: E402
from weightsync.v1.weight_sync_pb2_grpc import WeightSyncStub  # noqa: E402
from weightsync.wire.chunk import serialize_chunk  # noqa: E402

INLINE = SendOptions(transports=(Transport.INLINE,))
SHARED = SendOptions(transports=(Transport.SHARED_MEMORY,))
SOCKETS = Path("/proc/net/unix")
FDS = Path("/proc/self/fd")
SEGMENTS = Path("/dev/shm")  # noqa: S108 - it is looked at only


@pytest.fixture
def server() -> Iterator[Server]:
    """Serve a small model; arenas that nobody uses are kept."""
    with serve(tiny(0), tiny(1), limits=Limits(max_spare_bytes=1 << 20)) as running:
        yield running


@pytest.fixture
def fleet(server: Server) -> Iterator[Fleet]:
    """Connect to it."""
    with Fleet([server.address]) as connected:
        yield connected


def transport(fleet: Fleet, session_id: str) -> Transport:
    """Return the way of a session's bytes."""
    return fleet.workers[0].session(session_id).transport


def every_type() -> nn.Module:
    """Return a model with a buffer of each element type, odd sizes, and empty and 0-dim ones."""
    model = nn.Module()
    for dtype in DType:
        raw = torch.randint(0, 2 if dtype is DType.BOOL else 120, (5, 3, dtype.itemsize)).byte()
        model.register_buffer(f"of_{dtype.name.lower()}", raw.view(to_torch(dtype)).squeeze(-1))
    model.register_buffer("scalar", torch.tensor(1.5))
    model.register_buffer("empty", torch.empty(0, 3))
    return model


@pytest.mark.parametrize("scope", list(Scope))
def test_each_element_type_arrives(scope: Scope) -> None:
    """All types, odd sizes, 0-dim and empty tensors and strided sources land bit for bit."""
    torch.manual_seed(1)
    model, new = every_type(), every_type()
    strided = {
        name: t.t().contiguous().t() if t.ndim == 2 else t for name, t in new.state_dict().items()
    }
    with serve(model) as server, Fleet([server.address]) as fleet:
        with fleet.update(version="v1", scope=scope, options=SHARED) as session:
            session.push(strided)
        assert bits(model) == bits(new)


def test_both_targets_and_ties_arrive(fleet: Fleet, server: Server) -> None:
    """Verifier and draft in one session, a tied head once, by one arena."""
    new, draft = tiny(5), tiny(6)
    with fleet.update(version="v1", target=("verifier", "draft"), options=SHARED) as session:
        session.push(new, target=Target.VERIFIER)
        session.push(draft, target=Target.DRAFT)
    assert verify(fleet, new).equal
    assert verify(fleet, draft, target=Target.DRAFT).equal


def test_only_a_table_is_sent(server: Server) -> None:
    """Messages carry segments and no payload; the worker counts the bytes all the same."""
    sizes: list[int] = []
    remove = server.worker.trace.add(
        lambda name, facts: (
            sizes.append(int(str(facts["nbytes"]))) if name == "chunk.completed" else None
        )
    )
    new = tiny(5)
    with Fleet([server.address]) as fleet, fleet.update(version="v1", options=SHARED) as session:
        session.push(new)
    remove()
    total = sum(t.nbytes for t in new.state_dict().values())
    assert sum(sizes) == total == session.report.sent_bytes


def test_a_cast_goes_inline_within_the_session(fleet: Fleet) -> None:
    """What needs a cast can't be placed and is sent, beside what is placed."""
    new = tiny(5)
    wide = {k: t.float() if k.startswith("fc") else t for k, t in new.state_dict().items()}
    update = fleet.update(version="v1", cast=CastPolicy.ALLOW, options=SHARED)
    with update as session:
        session.push(wide)
    assert verify(fleet, new).equal


def test_a_trainer_computes_into_the_arena(fleet: Fleet, server: Server) -> None:
    """What was allocated needs no copy: its bytes are live after the commit."""
    new = tiny(5)
    with fleet.update(version="v1") as session:
        mine = session.allocate()
        assert {k: (t.shape, t.dtype) for k, t in mine.items()} == {
            k: (t.shape, t.dtype) for k, t in new.state_dict().items()
        }
        for name, tensor in new.state_dict().items():
            mine[name].copy_(tensor)
        session.push(mine)
    assert verify(fleet, new).equal


def test_a_part_can_be_allocated_by_name(fleet: Fleet) -> None:
    """Named tensors only; a name that does not exist is an error that names it."""
    with fleet.update(version="v1", scope=Scope.PARTIAL) as session:
        (head,) = session.allocate(["head.weight"]).values()
        head.fill_(2)
        session.push({"head.weight": head})
        with pytest.raises(UnknownTensorError, match="nose"):
            session.allocate(["nose"])
    (digest,) = fleet.workers[0].digests([Target.VERIFIER], ["head.weight"])
    assert digest.weight_version == "v1"


def test_without_shared_memory_nothing_is_allocated(fleet: Fleet) -> None:
    """A session whose bytes come inline says so."""
    with fleet.update(version="v1", options=INLINE) as session:
        with pytest.raises(UnsupportedError, match="on this host"):
            session.allocate()
        session.push(tiny(5))


def test_each_side_can_pin_a_way(fleet: Fleet) -> None:
    """Who offers inline only gets it; a worker without shared memory refuses what needs it."""
    with fleet.update(version="v1", options=INLINE) as session:
        assert transport(fleet, session.ticket.session_ids[0]) is Transport.INLINE
        session.push(tiny(5))
    with serve(tiny(0), shared_memory=False) as server, Fleet([server.address]) as other:
        assert other.workers[0].info().transports == (Transport.INLINE,)
        with pytest.raises(UnsupportedError, match="inline only"):
            other.update(version="v1", options=SHARED)
        with other.update(version="v1") as session:
            assert transport(other, session.ticket.session_ids[0]) is Transport.INLINE
            session.push(tiny(5))


def test_in_place_goes_inline(fleet: Fleet) -> None:
    """Live weights are never mapped by a client."""
    new = tiny(5)
    with fleet.update(version="v1", mode=UpdateMode.IN_PLACE) as session:
        assert transport(fleet, session.ticket.session_ids[0]) is Transport.INLINE
        session.push(new)
    assert verify(fleet, new).equal


def test_several_processes_fill_one_arena(fleet: Fleet, server: Server) -> None:
    """A rank that joins by the ticket maps the same arena and places its part."""
    new = tiny(5)
    names = list(new.state_dict())
    session = fleet.update(version="v1", options=SHARED)
    with Fleet([server.address]) as rank, rank.join(session.ticket) as joined:
        joined.push({k: new.state_dict()[k] for k in names[::2]})
    session.push({k: new.state_dict()[k] for k in names[1::2]})
    session.finish()
    assert verify(fleet, new).equal


def test_the_same_arena_comes_again_to_the_same_client_only(server: Server) -> None:
    """A kept arena is mapped once; another client never gets what an earlier one could write."""
    with Fleet([server.address]) as one, Fleet([server.address]) as two:
        with one.update(version="v1") as session:
            late = session.allocate()
            session.push(tiny(5))
        with one.update(version="v2") as session:
            again = session.allocate(["head.weight"])["head.weight"]
            assert again.data_ptr() == late["head.weight"].data_ptr()
            session.push(tiny(6))
        with two.update(version="v3") as session:
            session.push(tiny(7))
            for tensor in late.values():
                tensor.view(torch.uint8).fill_(255)
        assert verify(two, tiny(7)).equal


def test_clients_do_not_take_each_others_arenas(server: Server) -> None:
    """Who sends inline keeps a warm arena beside a client that maps its own."""
    arenas = server.worker.lending.arenas
    with Fleet([server.address]) as fleet:
        for count, options in enumerate((INLINE, SHARED, INLINE, SHARED, INLINE, SHARED)):
            with fleet.update(version=f"v{count}", options=options) as session:
                session.push(tiny(count))
            if count == 1:
                size = arenas.num_bytes
            # The first two sessions leave an arena each; nothing more is ever made.
            assert count < 2 or arenas.num_bytes == 2 * size


def test_a_kept_arena_goes_with_its_client(server: Server) -> None:
    """When the client's connection ends, its arenas are freed."""
    spare = server.worker.lending.arenas
    with Fleet([server.address]) as fleet:
        with fleet.update(version="v1") as session:
            session.push(tiny(5))
        assert spare.num_bytes > 0
    assert wait_until(lambda: spare.num_bytes == 0)


def wait_until(condition: object) -> bool:
    """Wait for what the worker's thread is about to do."""
    assert callable(condition)
    for _ in range(400):
        if condition():
            return True
        threading.Event().wait(0.05)
    return False


def test_nothing_is_left_behind(server: Server) -> None:
    """Neither descriptors nor files nor the socket outlive session, client and worker."""
    before = len(list(FDS.iterdir()))
    files = sorted(SEGMENTS.iterdir())

    def update() -> str:
        with serve(tiny(0)) as other, Fleet([other.address]) as fleet:
            with fleet.update(version="v1") as session:
                session.push(tiny(5))
            name = fleet.workers[0].info().shared_memory_socket
            assert name in SOCKETS.read_text()
            return name

    name = update()
    gc.collect()
    assert name not in SOCKETS.read_text()
    assert sorted(SEGMENTS.iterdir()) == files
    assert wait_until(lambda: len(list(FDS.iterdir())) <= before)


@contextlib.contextmanager
def hello(server: Server) -> Iterator[tuple[socket.socket, str]]:
    """Connect to a worker's socket with bare hands, and read who we are."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(f"\0{server.worker.lending.socket}")
        yield connection, connection.recv(128).decode().strip()


@contextlib.contextmanager
def channel(server: Server) -> Iterator[WeightSyncStub]:
    """Connect with bare stubs."""
    with grpc.insecure_channel(server.address) as opened:
        yield WeightSyncStub(opened)


@pytest.mark.parametrize("said", [b"nobody\n", b"\xff\xfe\n", b"\n", b"x" * 1000])
def test_nonsense_ends_the_connection(server: Server, said: bytes) -> None:
    """Who asks for no session, or says no line, is cut off; others are served on."""
    with hello(server) as (connection, _):
        connection.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with Fleet([server.address]) as fleet, fleet.update(version="v1", options=SHARED) as session:
        session.push(tiny(5))


def test_who_may_not_write_gets_no_arena(server: Server) -> None:
    """To know a session's id is not enough: the connection must be named by one who may write."""
    with Fleet([server.address]) as fleet:
        session = fleet.update(version="v1", options=SHARED)
        with hello(server) as (connection, _):
            connection.sendall(f"{session.ticket.session_ids[0]}\n".encode())
            with contextlib.suppress(ConnectionResetError):
                assert socket.recv_fds(connection, 1, 1)[:2] == (b"", [])
        session.abort()


def test_an_arena_can_not_be_taken_away(server: Server) -> None:
    """A client that truncates the memory it was handed is refused: the worker can't be killed."""
    with Fleet([server.address]) as fleet:
        session = fleet.update(version="v1", options=SHARED)
        with hello(server) as (connection, name), channel(server) as stub:
            session_id = session.ticket.session_ids[0]
            request = pb.ListPlacementsRequest(session_id=session_id, shared_memory_id=name)
            assert list(stub.ListPlacements(request))
            connection.sendall(f"{session_id}\n".encode())
            _, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
            for size in (0, 1 << 30):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
            os.close(fd)
        session.push(tiny(5))
        session.finish()
        assert verify(fleet, tiny(5)).equal


def test_idle_clients_are_bounded(server: Server) -> None:
    """Beyond the limit a connection is ended at once; those who go make room."""
    with contextlib.ExitStack() as waiting:
        for _ in range(MAX_CLIENTS):
            waiting.enter_context(hello(server))
        with socket.socket(socket.AF_UNIX) as one_more:
            one_more.settimeout(30)
            one_more.connect(f"\0{server.worker.lending.socket}")
            with contextlib.suppress(ConnectionResetError):
                assert one_more.recv(1) == b""
        with Fleet([server.address]) as fleet, fleet.update(version="v1") as session:
            assert transport(fleet, session.ticket.session_ids[0]) is Transport.INLINE
            session.push(tiny(5))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing(server: Server) -> None:
    """The kernel says whose process it is: another user's connection is ended without a word."""
    code = (
        "import os, socket, sys; os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(30);"
        "s.connect('\\0' + sys.argv[1]); print(s.recv(10))"
    )
    command = [sys.executable, "-S", "-c", code, server.worker.lending.socket]
    told = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert told.stdout.strip() == b"b''"


@pytest.mark.parametrize("shared_memory", [False, True])
def test_placed_bytes_need_a_mapped_arena(shared_memory: bool) -> None:
    """What is said to be placed is refused without an arena, or with another element type."""
    model = tiny(0)
    before = bits(model)
    # Its element type is bfloat16.
    dtype = DType.FLOAT16 if shared_memory else DType.BFLOAT16
    whole = Region.whole((10, 4))
    segment = Segment(Target.VERIFIER, "head.weight", dtype, (10, 4), whole, 0, 80, placed=True)
    with serve(model, shared_memory=shared_memory) as server, Fleet([server.address]) as fleet:
        session = fleet.update(version="v1", cast=CastPolicy.ALLOW)
        chunk = serialize_chunk(session.ticket.session_ids[0], [segment], (), ChecksumType.NONE)
        call = fleet.workers[0].send(iter([chunk]))
        with pytest.raises(grpc.RpcError, match="placed"):
            call.result(30)
        session.abort()
    assert bits(model) == before


def test_the_whole_arena_counts_against_the_limit() -> None:
    """Who maps an arena could fill it: a session whose arena does not fit is not opened."""
    with serve(tiny(0), limits=Limits(max_arena_bytes=100)) as server:
        with Fleet([server.address]) as fleet, pytest.raises(Exception, match="arena"):
            fleet.update(version="v1", scope=Scope.PARTIAL, options=SHARED)
        assert server.worker.staging_bytes == 0


def test_sessions_side_by_side(server: Server) -> None:
    """Verifier and draft, each in a session of its own from one client at once."""
    new, draft = tiny(5), tiny(6)
    with Fleet([server.address]) as fleet, ThreadPoolExecutor(2) as threads:

        def push(target: Target, source: nn.Module) -> None:
            for count in range(5):
                with fleet.update(version=f"v{count}", target=target, options=SHARED) as session:
                    session.push(source)

        jobs = [
            threads.submit(push, *one) for one in ((Target.VERIFIER, new), (Target.DRAFT, draft))
        ]
        for job in jobs:
            job.result()
        assert verify(fleet, new).equal
        assert verify(fleet, draft, target=Target.DRAFT).equal


def test_an_ended_session_is_not_handed_out(fleet: Fleet) -> None:
    """The arena of an aborted session can't be mapped any more."""
    session = fleet.update(version="v1", options=SHARED)
    session.abort()
    with pytest.raises(SessionStateError):
        fleet.workers[0]._arenas.map(session.ticket.session_ids[0])  # type: ignore[union-attr]


def test_a_killed_client_leaves_nothing(server: Server) -> None:
    """A client that dies while it writes changes nothing; its arena goes with its lease."""
    code = """
import sys
from weightsync_client import Fleet
fleet = Fleet([sys.argv[1]])
session = fleet.update(version="dead", lease=0.5)
session.allocate()["head.weight"].fill_(7)
print("written", flush=True)
sys.stdin.read()
"""
    before = bits(server.worker._engine.targets[Target.VERIFIER].tensors())
    command = [sys.executable, "-c", code, server.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"written\n"
        trainer.kill()
    assert wait_until(lambda: server.worker.staging_bytes == 0)
    assert wait_until(lambda: server.worker.lending.arenas.num_bytes == 0)
    assert bits(server.worker._engine.targets[Target.VERIFIER].tensors()) == before
