"""The verifier's version, which a worker holds and vLLM tells elsewhere."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

from weightsync.integrations.vllm.epoch import engine_file

_log = logging.getLogger(__name__)
_ATTRIBUTE = "_weight_version"


class HeldVersion:
    """A file on this host that says what the verifier of an engine holds."""

    def __init__(self, instance_id: str) -> None:
        """Name the file of an engine; it need not exist."""
        self._path = engine_file(instance_id, "version")
        self._seen = (0, 0)
        self._version: str | None = None

    def write(self, version: str) -> None:
        """Tell what was committed, or by nothing that this is not known.

        A reader never sees a part of it.
        """
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = self._path.with_suffix(f".{os.getpid()}.new")
        unfinished.write_text(version)
        unfinished.replace(self._path)

    def read(self) -> str | None:
        """Return the version; None before the first commit. One call of the system, mostly."""
        try:
            status = self._path.stat()
            if (seen := (status.st_ino, status.st_mtime_ns)) != self._seen:
                self._version, self._seen = self._path.read_text(), seen
        except FileNotFoundError:
            return None
        return self._version

    def remove(self) -> None:
        """Take the file away, when the engine stops."""
        self._path.unlink(missing_ok=True)


def follow_commits(core_class: Any, backend: str) -> None:  # noqa: ANN401 - of vLLM
    """Let engines with our backend tell the version that their verifier holds.

    Whoever made the commit, a session's own version is told. Before the first commit, and in other
    engines, it is what vLLM was told.
    """
    setattr(core_class, _ATTRIBUTE, _FollowedVersion(backend))


class _FollowedVersion:
    """The attribute of vLLM's engine that holds its version."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._files: weakref.WeakKeyDictionary[Any, HeldVersion] = weakref.WeakKeyDictionary()

    def __get__(self, core: Any, _owner: object = None) -> Any:  # noqa: ANN401
        if core is None:
            return self
        held = self._held(core)
        now = held.read() if held else None
        return core.__dict__[_ATTRIBUTE] if now is None else now

    def __set__(self, core: Any, version: str) -> None:  # noqa: ANN401
        held = self._held(core)
        now = held.read() if held else None
        if now and now != version:
            _log.warning(
                "vLLM was told that its weights are %r, but the verifier holds %r, as its session"
                " was asked for, and this is told further on",
                version,
                now,
            )
            return
        if held and now == "":
            held.remove()  # vLLM has got its weights in another way
        core.__dict__[_ATTRIBUTE] = version

    def _held(self, core: Any) -> HeldVersion | None:  # noqa: ANN401
        transfer = core.vllm_config.weight_transfer_config
        if transfer is None or transfer.backend != self._backend:
            return None
        if core not in self._files:
            self._files[core] = HeldVersion(core.vllm_config.instance_id)
        return self._files[core]
