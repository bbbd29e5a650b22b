"""Small models, their bytes, and a connection that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import nn


def tiny(seed: int, *, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model with an embedding, a layer, a persistent and a non-persistent buffer."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.embed = nn.Embedding(10, 4)
    model.fc = nn.Linear(4, 4)
    model.ln = nn.LayerNorm(4)
    model.head = nn.Linear(4, 10, bias=False)
    model.to(dtype)
    model.register_buffer("rot", torch.randn(4), persistent=False)
    model.register_buffer("rbias", torch.randn(4))
    if tied:
        model.head.weight = model.embed.weight
    return model


def bits(source: nn.Module | Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the bytes of each tensor of a state dict."""
    state = source.state_dict() if isinstance(source, nn.Module) else source
    return {
        name: bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, t in state.items()
    }


class Proxy:
    """Forwards TCP connections to an address, and cuts them when told."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.refusing = False
        self._cut_after: int | None = None
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections now."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def cut_after(self, num_bytes: int) -> None:
        """Cut all connections once that many bytes have gone to the worker."""
        self._cut_after = num_bytes

    def close(self) -> None:
        """Stop, and cut all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            self.connections += 1
            server = socket.create_connection(self._to)
            with self._lock:
                self._open += [client, server]
            for pair, up in (((client, server), True), ((server, client), False)):
                threading.Thread(target=self._pump, args=(*pair, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if up and self._cut_after is not None:
                    if len(data) > self._cut_after:
                        sink.sendall(data[: self._cut_after])
                        self._cut_after = None
                        self.cut()
                        return
                    self._cut_after -= len(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def produce(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's tensors, each in the same memory, which is overwritten for the next."""
    scratch = torch.empty(max(t.nbytes for t in model.state_dict().values()), dtype=torch.uint8)
    for name, tensor in model.state_dict().items():
        place = scratch[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        place.copy_(tensor)
        yield name, place
        scratch.fill_(255)
