"""What a model computes from its weights once and keeps: which weights feed it, and how anew."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from weightsync.apply.bits import storage_identity
from weightsync.core.errors import UnsupportedError
from weightsync.engines.vllm.reload import FUSE, derive, process_again
from weightsync.engines.vllm.reloads import Reload
from weightsync.engines.vllm.shadow import Shadows
from weightsync.engines.vllm.slots import Sent, Slot


@dataclass(frozen=True, eq=False, slots=True)
class _Rebuild:
    """One thing that is computed from weights.

    Attributes:
        stage: Those of an earlier stage come first: later ones read what they make.
        run: Compute it anew, into the memory where it lies.
    """

    stage: int
    run: Callable[[], None]


class Derived:
    """All that the models of a worker compute from weights."""

    def __init__(self, shadows: Shadows) -> None:
        """Start with nothing; `shadows` must be complete before a model is added."""
        self._shadows = shadows
        self._fed_by: dict[Slot, list[_Rebuild]] = {}
        self._reloads: dict[Sent, Reload] = {}
        self._seen: set[nn.Module] = set()

    def add(self, model: nn.Module, slots: Mapping[str, Slot], dtype: torch.dtype) -> None:
        """Find what a model computes from its weights.

        Args:
            model: Loaded.
            slots: Its tensors, by name.
            dtype: Type of its activations.

        Raises:
            UnsupportedError: a module's weights are not the checkpoint's, and it is not known how
                they are made.
        """
        names = {slot.module: name.rpartition(".")[0] for name, slot in slots.items()}
        absorbed = {
            module.kv_b_proj: module
            for module in model.modules()
            if is_deferred_attention_layer(module) and hasattr(module, "kv_b_proj")
        }
        for module in names.keys() - self._seen:
            if module in absorbed:
                attention = absorbed[module]
                self._feed(module, 1, partial(self._absorb, module, attention, dtype))
            elif module in self._shadows.modules:
                if not isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
                    raise UnsupportedError(
                        f"{names[module]!r} ({type(module).__name__}) does not hold what the "
                        "checkpoint has, and does not say how it makes it; it can't be updated"
                    )
                self._feed(module, 0, partial(process_again, module, self._shadows.of(module)))
            elif isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                # The product with the vocabulary uses a packed copy; the table itself is plain.
                self._feed(module, 0, partial(derive, module))
        inner = getattr(model, "model", model)
        if hasattr(inner, FUSE):
            fused = _Rebuild(2, partial(self._fuse, inner))
            for module in names.keys() - self._seen:
                self._feed_rebuild(module, fused)
        self._seen |= names.keys()

    def add_reloads(self, reloads: Iterable[Reload]) -> None:
        """Add what a model must load itself; call it after `add`."""
        self._reloads |= {sent: reload for reload in reloads for sent in reload.sent.values()}

    def rebuild(self, written: Iterable[Slot | Sent]) -> None:
        """Compute anew what some slots feed, and nothing else.

        Call it under `set_current_vllm_config`.
        """
        # Kernels on the CPU lay weights out by the number of threads, and take it for granted that
        # all weights of one shape lie alike. To ask torch for the number makes it this thread's.
        torch.get_num_threads()
        with torch.inference_mode():
            slots = list(self._load(written))
            due = {rebuild: None for slot in slots for rebuild in self._fed_by.get(slot, ())}
            for rebuild in sorted(due, key=lambda r: r.stage):
                rebuild.run()

    def _load(self, written: Iterable[Slot | Sent]) -> Iterator[Slot]:
        """Load again what was sent, and yield all that is written then, ties included."""
        due: dict[Reload, None] = {}
        for slot in written:
            if isinstance(slot, Slot):
                yield slot
            else:
                due[self._reloads[slot]] = None
        for reload in due:
            reload.run()
        reached = {self._storage(slot) for reload in due for slot in reload.slots}
        yield from (slot for slot in self._fed_by if due and self._storage(slot) in reached)

    def _storage(self, slot: Slot) -> Hashable:
        return storage_identity(self._shadows.tensor(slot))

    def _feed(self, module: nn.Module, stage: int, run: Callable[[], None]) -> None:
        self._feed_rebuild(module, _Rebuild(stage, run))

    def _feed_rebuild(self, module: nn.Module, rebuild: _Rebuild) -> None:
        held = {**module._parameters, **module._buffers}  # noqa: SLF001 - its own ones only
        for leaf, tensor in held.items():
            if tensor is not None:
                self._fed_by.setdefault(Slot(module, leaf), []).append(rebuild)

    def _absorb(self, projection: nn.Module, attention: Any, dtype: torch.dtype) -> None:  # noqa: ANN401
        """Let latent attention split its projection again; some kernels have dropped the whole."""
        for leaf, shadow in self._shadows.of(projection).items():
            fresh = nn.Parameter(shadow.clone(), requires_grad=False)
            projection._parameters[leaf] = fresh  # noqa: SLF001 - as the kernels drop it
        attention.process_weights_after_loading(dtype)

    def _fuse(self, inner: Any) -> None:  # noqa: ANN401
        """Let a draft fuse the projections of all its layers again."""
        with ExitStack() as stack:
            for module in inner.modules():
                stack.enter_context(_showing(module, self._shadows.of(module)))
            inner._build_fused_kv_buffers()  # noqa: SLF001 - there is no other way to it


@contextmanager
def _showing(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module hold other values within the block."""
    kept = {leaf: module._parameters[leaf] for leaf in values}  # noqa: SLF001
    try:
        for leaf, value in values.items():
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)  # noqa: SLF001
        yield
    finally:
        module._parameters.update(kept)  # noqa: SLF001
