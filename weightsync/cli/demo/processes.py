"""Two processes beside this one: they tell it what happens, and end when it ends."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from weightsync.cli.demo.events import Event, Failed
from weightsync.core.errors import InternalError

if TYPE_CHECKING:
    from typing_extensions import Self

_LAST_SECONDS = 5.0


class Patient(Protocol):
    """What processes are told; to the one that starts them it says how long they may take."""

    @property
    def patience(self) -> float:
        """Seconds after which the whole demo gives up."""
        ...


class Processes:
    """A context manager around processes that are ended with the block, whatever happens."""

    def __init__(self, plan: Patient, *names: str) -> None:
        """Start a process per name.

        Args:
            plan: What each is told.
            names: Modules beside this one or below, whose `run` is what a process does.
        """
        # Spawned: torch and grpc do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._patience = plan.patience
        self._connections: dict[str, Connection] = {}
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for name in names:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(name, theirs, plan), name=name, daemon=True
            )
            process.start()
            theirs.close()
            self._connections[name] = ours
            self._processes.append(process)

    def send(self, name: str, event: Event) -> None:
        """Tell a process something."""
        self._connections[name].send(event)

    def events(self) -> Iterator[Event]:
        """Yield what the processes tell, until both have ended.

        Raises:
            InternalError: a process failed, or all together took too long.
        """
        end = time.monotonic() + self._patience
        names = {connection: name for name, connection in self._connections.items()}
        while names:
            ready = multiprocessing.connection.wait(list(names), end - time.monotonic())
            if not ready:
                raise InternalError(f"the demo did not end within {self._patience:.0f} s")
            for connection in [known for known in names if known in ready]:
                try:
                    event = connection.recv()
                except (EOFError, ConnectionResetError):
                    names.pop(connection)
                    continue
                if isinstance(event, Failed):
                    raise InternalError(f"the {event.process} failed: {event.error}")
                yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._connections.values():
            connection.close()
        for process in self._processes:
            # Who has finished its work sees the closed pipe and ends by itself.
            process.join(_LAST_SECONDS if kind is None else 0)
            process.terminate()
            process.join(_LAST_SECONDS)
            process.kill()


def _run(name: str, connection: Connection, plan: Patient) -> None:
    # Ctrl-C reaches all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch

        from weightsync.cli.quiet import quiet_transformers

        # One core for each process.
        torch.set_num_threads(1)
        quiet_transformers()
        importlib.import_module(f"{__package__}.{name}").run(connection, plan)
    except (BrokenPipeError, EOFError):
        return  # Nobody listens any more.
    except Exception:  # noqa: BLE001 - told by the process that shows errors
        connection.send(Failed(name, traceback.format_exc()))
