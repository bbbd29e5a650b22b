"""A training loop that keeps a running worker in step.

Run it alone, and it serves a worker in a process of its own first:

    python torch_loop.py

or give it the address of a worker that serves the same model:

    python torch_loop.py 10.0.0.1:50051
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import torch
from torch import nn
from weightsync_client import Progress, push_model, verify


def make_model(seed: int) -> nn.Sequential:
    """Return a small model; trainer and worker start from different values."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))


def run_worker(parent: Connection) -> None:
    """Serve the model until the parent says stop."""
    from weightsync.server.serve import serve  # noqa: PLC0415 - in the worker's process only

    with serve(make_model(seed=0)) as server:
        parent.send(server.address)
        parent.recv()


def train(address: str, num_steps: int = 40, push_every: int = 10) -> None:
    """Teach the model to reverse its input, and push every few steps."""
    model = make_model(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, num_steps + 1):
        inputs = torch.randn(64, 16)
        loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % push_every == 0:
            report = push_model(address, model, version=f"step-{step}", progress=show)
            print(f"step {step}: loss {loss.item():.3f}, {report}")
    print("worker equals trainer, bit for bit:", verify(address, model).equal)


def show(progress: Progress) -> None:
    """Print how far a push is."""
    print(f"  {progress.tensor}: {progress.bytes_done} of {progress.bytes_total} bytes")


def main() -> None:
    """Train against the worker that is named, or against one of our own."""
    if len(sys.argv) > 1:
        train(sys.argv[1])
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=run_worker, args=(theirs,))
    worker.start()
    theirs.close()
    try:
        train(ours.recv())
    finally:
        ours.send("stop")
        worker.join()


if __name__ == "__main__":
    main()
