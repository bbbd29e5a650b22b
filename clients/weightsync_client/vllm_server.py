"""vLLM's server, over its HTTP routes."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from weightsync.core.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    UnauthenticatedError,
    UnsupportedError,
)
from weightsync.core.rankfile import RankFile
from weightsync_client.channel import is_local
from weightsync_client.errors import ConnectionLostError, DeadlineError

_BACKEND = "weightsync"
_PAUSE = 0.2
_PORTS = {"http": 80, "https": 443}
_WILDCARDS = ("0.0.0.0:", "[::]:")
_NO_ROUTE = (404, 405)
_NO_ACCESS = (401, 403)


class VllmServer:
    """A server that was started with `VLLM_SERVER_DEV_MODE=1` and the backend `weightsync`.

    Has the methods of vLLM's `VLLMWeightSyncClient`, and the draft's. Each raises
    `ConnectionLostError` and `DeadlineError`, and what the server said as
    `EngineUnavailableError`, `UnsupportedError` (no such route) or `UnauthenticatedError`.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 300.0) -> None:
        """Name a server.

        Args:
            url: `http://HOST:PORT`, or with `https`.
            api_key: What the server was given as `--api-key`.
            timeout: Longest wait for an answer, in seconds; a commit is one answer.

        Raises:
            InvalidRequestError: no such URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise InvalidRequestError(
                f"{url!r} is no address of a server: write http://HOST:PORT", subjects=["url"]
            )
        self._url = url.rstrip("/")
        self._place = (parts.hostname, parts.port or _PORTS[parts.scheme])
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        # A proxy of the environment can't reach what only this host can.
        proxies: dict[str, str] | None = {} if is_local("{}:{}".format(*self._place)) else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))

    def __repr__(self) -> str:
        return f"VllmServer({self._url!r})"

    def ranks(self, timeout: float = 60.0) -> list[RankFile]:
        """Return where the service of each rank can be reached from here.

        Args:
            timeout: Seconds to wait for a server that is still loading.

        Raises:
            UnsupportedError: the server has no such routes or another backend, or several
                engines for data parallelism, of which one only would answer.
            InvalidRequestError: its ranks listen where only their own host can reach them.
            WeightSyncError: see the class.
        """
        end = time.monotonic() + timeout
        config = self._config(end)
        if ((config.get("weight_transfer_config") or {}).get("backend")) != _BACKEND:
            raise UnsupportedError(
                f"the vLLM at {self._url} runs without the service: install weightsync beside it"
                ' and start it with --weight-transfer-config \'{"backend": "weightsync"}\''
            )
        asked = {"method": "weightsync_rank"}
        results = self._call("collective_rpc", asked, max(1.0, end - time.monotonic()))["results"]
        ranks = RankFile.parse_all(results, self._url)
        here = self._on_this_host()
        return [rank.at(self._reachable(rank, here=here)) for rank in ranks]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing on the server: its services run already."""
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update of the verifier."""
        self._call("start_weight_update", {})

    def start_draft_weight_update(self) -> None:
        """Begin an update of the draft."""
        self._call("start_draft_weight_update", {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Commit a session on all ranks."""
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and say what the weights are."""
        self._call("finish_weight_update", {"weight_version": weight_version})

    def weight_version(self) -> str:
        """Return what vLLM says that its weights are."""
        return str(self._call("weight_info")["weight_version"])

    def _config(self, end: float) -> dict[str, Any]:
        while True:
            left = max(1.0, end - time.monotonic())
            try:
                info = self._call("server_info?config_format=json", timeout=left)
                found: dict[str, Any] = info["vllm_config"]
            except ConnectionLostError as error:
                if time.monotonic() > end:
                    raise EngineUnavailableError(f"{error}; is vLLM up?", retry_after=1) from error
                time.sleep(_PAUSE)
            else:
                return found

    def _reachable(self, rank: RankFile, *, here: bool) -> str:
        for wildcard in _WILDCARDS:
            if rank.address.startswith(wildcard):
                host = self._place[0]
                port = rank.address.removeprefix(wildcard)
                return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if is_local(rank.address) and not here:
            raise InvalidRequestError(
                f"rank {rank.rank} of the vLLM at {self._url} listens at {rank.address}, which only"
                ' its own host can reach; start vLLM with the setting "address" of weightsync, e.g.'
                " WEIGHTSYNC_VLLM_ADDRESS=0.0.0.0:0, and certificates",
                subjects=["address"],
            )
        return rank.address

    def _on_this_host(self) -> bool:
        try:
            with socket.create_connection(self._place, self._timeout) as connection:
                return bool(connection.getsockname()[0] == connection.getpeername()[0])
        except OSError as error:
            raise ConnectionLostError(f"{self._url}: {error}", worker=self._url) from error

    def _call(
        self, route: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> Any:  # noqa: ANN401 - what the route answers
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(f"{self._url}/{route}", data, headers)  # noqa: S310
        try:
            with self._opener.open(request, timeout=timeout or self._timeout) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                raise self._said(route, error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise DeadlineError(
                    f"{self._url}/{route}: no answer in time", worker=self._url
                ) from error
            raise ConnectionLostError(
                f"{self._url}/{route}: {reason!r}", worker=self._url
            ) from error

    def _said(self, route: str, error: urllib.error.HTTPError) -> Exception:
        if error.code in _NO_ROUTE:
            return UnsupportedError(
                f"{self._url} has no route /{route}: start vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        if error.code in _NO_ACCESS:
            return UnauthenticatedError(
                f"{self._url} wants its API key: give the right api_key (HTTP {error.code})"
            )
        text = error.read().decode(errors="replace")
        try:
            said = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            said = text
        return EngineUnavailableError(
            f"{self._url}/{route}: {said or error.reason} (HTTP {error.code})", retry_after=1
        )
