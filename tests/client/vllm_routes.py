"""The routes of vLLM's server that trainers call, in front of workers of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from weightsync.core.rankfile import RankFile
from weightsync.server.server import Server

Route = Callable[[Any], Any]


class RefusedError(Exception):
    """An answer that is none; status 0: the connection is cut."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status


class Routes:
    """What a test's server answers, and what it was asked.

    Attributes:
        calls: Names of the routes that were called, with what `update_weights` and
            `finish_weight_update` were given.
        keys: What came as authorization.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self.calls: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()
        config = {"weight_transfer_config": {"backend": "weightsync"}}
        self.places = [
            RankFile(rank, len(servers), rank, 1, server.address, server.worker.instance_id)
            for rank, server in enumerate(servers)
        ]
        self.routes: dict[str, Route] = {
            "server_info": lambda _: {"vllm_config": config},
            "collective_rpc": lambda _: {"results": [asdict(place) for place in self.places]},
            "start_weight_update": self._noted("start"),
            "start_draft_weight_update": self._noted("start draft"),
            "update_weights": self.update_weights,
            "finish_weight_update": self._noted("finish", "weight_version"),
            "weight_info": lambda _: {"weight_version": "v"},
        }

    def update_weights(self, body: Any) -> None:
        """Commit on all workers."""
        self.calls.append(("update", len(body["update_info"])))
        for server, info in zip(self._servers, body["update_info"], strict=True):
            server.worker.finish(info["session_id"])

    def _noted(self, call: str, key: str = "") -> Route:
        return lambda body: self.calls.append((call, body.get(key)))


def _no_route(_body: Any) -> None:
    raise RefusedError(404)


@contextmanager
def routed(routes: Routes) -> Iterator[str]:
    """Serve routes, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            routes.keys.add(self.headers.get("Authorization"))
            name = self.path.strip("/").partition("?")[0]
            try:
                route: Route = routes.routes.get(name, _no_route)
                self._answer(200, route(json.loads(body or b"null")))
            except RefusedError as refusal:
                if refusal.status:
                    self._answer(refusal.status, {"error": {"message": str(refusal)}})
                self.close_connection = True

        do_GET = do_POST  # noqa: N815 - the name that the library wants

        def _answer(self, status: int, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
