"""Small models, their bytes, served ones, and a connection that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from weightsync_client import Fleet

from weightsync.server.serve import serve


class Tiny(nn.Module):
    """An embedding, a layer, a norm, a head, a persistent and a non-persistent buffer."""

    rot: torch.Tensor
    rbias: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 4)
        self.ln = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.to(dtype)
        self.register_buffer("rot", torch.randn(4), persistent=False)
        self.register_buffer("rbias", torch.randn(4))


def tiny(seed: int, *, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tiny:
    """Return a model whose values depend on the seed."""
    torch.manual_seed(seed)
    model = Tiny(dtype)
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
        self.redirect(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._refusing = threading.Event()
        self._flowing = threading.Event()
        self._flowing.set()
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

    def redirect(self, address: str) -> None:
        """Let new connections go to another address."""
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))

    def pause(self) -> None:
        """Cut all connections, and refuse new ones until `resume`."""
        self._refusing.set()
        self.cut()

    def resume(self) -> None:
        """Take connections again."""
        self._refusing.clear()

    def stall(self) -> None:
        """Take nothing more from clients, without a word."""
        self._flowing.clear()

    def close(self) -> None:
        """Stop, and cut all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._flowing.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing.is_set():
                client.close()
                continue
            self.connections += 1
            server = socket.create_connection(self._to)
            with self._lock:
                self._open += [client, server]
            if self._refusing.is_set():  # Since a moment ago.
                self.cut()
            for pair, up in (((client, server), True), ((server, client), False)):
                threading.Thread(target=self._pump, args=(*pair, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
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


def without(state: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Return a state dict that lacks a name."""
    return {k: v for k, v in state.items() if k != name}


class Live:
    """A served verifier and draft that share their embedding, and a fleet of that one worker."""

    def __init__(self, address: str, *, shared_memory: bool = True) -> None:
        self.verifier = tiny(0)
        self.draft = tiny(1)
        self.draft.embed.weight = self.verifier.embed.weight
        self.server = serve(self.verifier, self.draft, address=address, shared_memory=shared_memory)
        self.fleet = Fleet([self.server.address])
        self.worker = self.fleet.workers[0]
