"""Distributed training (FSDP2): each rank sends its own shards into one session.

    python fsdp2.py

starts a worker and two ranks on gloo. Nothing is gathered: rank 0 opens the session, the others
join it with a ticket, and when all have sent their shards, rank 0 commits.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from weightsync_client import Fleet, FleetReport, verify

NUM_RANKS = 2


def make_model(seed: int) -> nn.Sequential:
    """Return a small model; its rows do not divide evenly by the number of ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 63), nn.GELU(), nn.LayerNorm(63), nn.Linear(63, 16))


def push_shards(address: str, model: nn.Module, version: str) -> FleetReport | None:
    """Send this rank's shards; rank 0 opens the session and commits it."""
    with Fleet([address]) as fleet:
        ticket: list[Any] = [None]
        if dist.get_rank() == 0:
            session = fleet.update(version=version)
            ticket = [session.ticket]
        dist.broadcast_object_list(ticket)
        if dist.get_rank() != 0:
            session = fleet.join(ticket[0])
        with session:
            session.push(model)
            session.settle()
            dist.barrier()  # All shards have arrived.
        dist.barrier()  # The version is live.
        return session.report if dist.get_rank() == 0 else None


def train(rank: int, address: str, port: int) -> None:
    """Train for a few steps and push after each."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    torch.set_num_threads(1)
    model = make_model(seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 4):
        inputs = torch.randn(64, 16)
        loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        report = push_shards(address, model, version=f"step-{step}")
        if report is not None:
            print(f"step {step}: {report}, {report.sent_bytes} bytes from rank 0")
    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if rank == 0:
        print("worker equals trainer, bit for bit:", verify(address, full).equal)
    dist.destroy_process_group()


def main() -> None:
    """Serve a worker here, and train in processes of their own."""
    from weightsync.server.serve import serve  # noqa: PLC0415 - the ranks do without

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serve(make_model(seed=0)) as server:
        spawn(train, args=(server.address, port), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
