"""A trainer in a process that may be killed; it knows nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from weightsync_client import Fleet, SendOptions

from weightsync.core.types import CastPolicy, Target, Transport

# A process that has imported all this once, and forks for each trainer.
_context = get_context("forkserver")
_context.set_forkserver_preload([__name__])


def start(address: str, folders: Mapping[Target, Path], *transports: Transport) -> BaseProcess:
    """Start to send checkpoints to a worker, in one session for all targets, and to commit it."""
    args = (address, dict(folders), transports)
    process = _context.Process(target=_push, args=args, daemon=True)
    process.start()
    return process


def _push(address: str, folders: Mapping[Target, Path], transports: tuple[Transport, ...]) -> None:
    torch.set_num_threads(1)
    with (
        Fleet([address]) as fleet,
        fleet.update(
            version="trained",
            target=tuple(folders),
            cast=CastPolicy.ALLOW,
            options=SendOptions(chunk_bytes=1 << 14, transports=transports),
        ) as session,
    ):
        for target, folder in folders.items():
            session.push(folder, target=target)
        session.finish()
