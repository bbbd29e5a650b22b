"""A fork takes gRPC's locks along and leaves its threads behind: a child would wait for ever."""

from __future__ import annotations

import os
from typing import final

from weightsync.core.errors import UnsupportedError


@final
class _Process:
    """This process, and whether its parent had connections when it was forked.

    Attributes:
        is_crippled: Whether nothing of gRPC may be touched here.
    """

    def __init__(self) -> None:
        self.is_crippled = False
        self._connected = False
        os.register_at_fork(after_in_child=self._forked)

    def connect(self) -> None:
        """Note that gRPC is used from now on.

        Raises:
            UnsupportedError: as `check`.
        """
        self.check()
        self._connected = True

    def check(self) -> None:
        """Refuse what needs gRPC in a forked child.

        Raises:
            UnsupportedError: the parent had connected to a worker before it forked this process.
        """
        if self.is_crippled:
            raise UnsupportedError(
                "this process was forked from one that had connected to a worker, and gRPC does"
                " not survive a fork: use workers in the parent only, start this process by"
                " 'spawn' or 'forkserver', or fork before the first connection"
            )

    def _forked(self) -> None:
        self.is_crippled = self._connected


process = _Process()
"""This one."""
