"""How a child process talks with the one that started it: a JSON object per line."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping

_output = threading.Lock()


def tell(kind: str, value: object = None) -> None:
    """Write one line to the parent."""
    with _output:
        print(json.dumps({"kind": kind, "value": value}), flush=True)


def obey(commands: Mapping[str, Callable[..., object]]) -> None:
    """Do what the parent says, in a thread of its own; end with the parent."""
    threading.Thread(target=_obey, args=(commands,), name="obey", daemon=True).start()


def _obey(commands: Mapping[str, Callable[..., object]]) -> None:
    # Unbuffered: a reader that waits with the buffer's lock would disturb the exit.
    for line in io.FileIO(sys.stdin.fileno(), closefd=False):
        command = json.loads(line)
        name = command.pop("do")
        tell(name, commands[name](**command))
    os._exit(1)
