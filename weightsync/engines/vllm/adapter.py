"""The engine around a vLLM worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.model_loader.utils import get_draft_load_config

from weightsync.core.errors import UnsupportedError
from weightsync.core.types import CacheReset, Coordinates, Target
from weightsync.engines.base import SleepWatcher, Written
from weightsync.engines.naming import parameter_spec
from weightsync.engines.unshare import unshare
from weightsync.engines.vllm.caches import outlive_requests
from weightsync.engines.vllm.checkpoint import DUMMY, Checkpoint
from weightsync.engines.vllm.derived import Derived
from weightsync.engines.vllm.expected import expected
from weightsync.engines.vllm.gate import WorkerGate
from weightsync.engines.vllm.layouts import layout_of, sent_name
from weightsync.engines.vllm.record import record
from weightsync.engines.vllm.reloads import layers, reloads
from weightsync.engines.vllm.shadow import Shadows
from weightsync.engines.vllm.sharing import Sharing, find_sharing
from weightsync.engines.vllm.sleep import CALLS, watch_sleep
from weightsync.engines.vllm.slots import Sent, Slot, named_slots
from weightsync.layout.plan import Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)


class VllmTarget:
    """A `TargetModel` of a vLLM worker: parameters, or their shadows, by vLLM's names."""

    def __init__(
        self,
        places: Mapping[str, Slot | Sent],
        layout: Layout,
        shadows: Shadows,
        cut: Callable[[Collection[str]], None],
    ) -> None:
        """Take what `VllmEngine` has found out about a model, and what cuts it off the verifier."""
        self.places = places
        self._layout = layout
        self._shadows = shadows
        self._cut = cut

    @property
    def layout(self) -> Layout:
        """Where the checkpoint's tensors lie."""
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what commits write: parameters, or shadows where kernels hold another form."""
        return {name: self._shadows.tensor(self.places[name]) for name in self._layout.parameters}

    def unshare(self, names: Collection[str]) -> None:
        """Give parameters a storage of their own, with equal values, cutting them off the verifier.

        Raises:
            UnsupportedError: graphs or kernels refer to the verifier's storage.
        """
        self._cut(names)

    def move(self, slots: Mapping[str, Slot]) -> None:
        """Take other slots for some names, which hold tensors of equal forms."""
        self.places = {**self.places, **slots}
        tensors = self.tensors()
        specs = [parameter_spec(name, tensors[name]) for name in self._layout.parameters]
        self._layout = Layout.of(specs, self._layout.tensors.values())


class VllmEngine:
    """An `Engine` around the models of one worker process.

    Make it when the models are loaded and before the first step.

    Attributes:
        sharing: What verifier and draft hold together; None without a draft that has weights.
    """

    name = "vllm"
    sleep_calls = CALLS
    reset_prefix_cache: Callable[[], bool]

    def __init__(
        self,
        worker: Any,  # noqa: ANN401 - the worker class of any device
        reset_cache: Callable[[], bool] | None = None,
        *,
        share: bool = True,
    ) -> None:
        """Learn how checkpoints become parameters, and put the worker under the gate.

        Args:
            worker: `vllm.v1.worker.gpu_worker.Worker` or a subclass, after `load_model`.
            reset_cache: Drops prefixes that were computed with old weights; returns whether it
                does. They belong to vLLM's scheduler, in another process.
            share: Let the draft hold what equals the verifier's and vLLM has left apart.

        Raises:
            UnsupportedError: a model loads its weights in a way that can't be followed.
        """
        config: VllmConfig = worker.vllm_config
        self._config = config
        self._worker = worker
        if reset_cache is not None:
            self.reset_prefix_cache = reset_cache
        self._agree: Callable[[str], None] = _nothing
        self._shadows = Shadows()
        self._derived = Derived(self._shadows)
        self._gate = WorkerGate(worker, num_ranks=config.parallel_config.world_size_across_dp)
        verifier, draft = worker.get_model(), worker.get_draft_model()
        self.sharing: Sharing | None = None
        if isinstance(draft, nn.Module):
            formats = {
                one.load_format for one in (config.load_config, get_draft_load_config(config))
            }
            # Dummy weights of one shape are equal, and mean nothing.
            widen = share and DUMMY not in formats
            group = get_tp_group().cpu_group
            self.sharing = find_sharing(verifier, draft, widen=widen, group=group)
        self._targets = {Target.VERIFIER: self._target(verifier, config)}
        if isinstance(draft, nn.Module):
            self._targets[Target.DRAFT] = self._target(draft, config, draft=True)

    def _target(self, model: nn.Module, config: VllmConfig, *, draft: bool = False) -> VllmTarget:
        model_config, load_config = config.model_config, config.load_config
        if draft:
            model_config = config.speculative_config.draft_model_config
            load_config = get_draft_load_config(config)
        with (
            Checkpoint(model_config, load_config, model) as checkpoint,
            set_current_vllm_config(config),
        ):
            forms = checkpoint.forms()
            found = record(model, forms)
            slots = dict(named_slots(model))
            self._shadows.add(expected(found, slots, checkpoint))
            reloaded = reloads(model, found.groups, checkpoint, self._shadows)
        self._derived.add(model, slots, model_config.dtype)
        self._derived.add_reloads(reloaded)
        sent = {name: kept for reload in reloaded for name, kept in reload.sent.items()}
        if sent:
            _log.warning(
                "%s computes with %d tensors while it loads: after an update of one of them vLLM "
                "loads these layers again: %s",
                type(model).__name__,
                len(sent),
                ", ".join(layers(reloaded, slots)),
            )
        verifier = self._targets[Target.VERIFIER].layout if draft else None
        places = slots | {sent_name(name): kept for name, kept in sent.items()}
        layout = layout_of(found, forms, places, self._shadows, verifier)
        return VllmTarget(places, layout, self._shadows, self._unshare)

    @property
    def version(self) -> str:
        """Version of vLLM."""
        return str(vllm.__version__)

    @property
    def coordinates(self) -> Coordinates:
        """Place of this worker among its peers."""
        parallel = self._config.parallel_config
        tp, pp = get_tp_group(), get_pp_group()
        return Coordinates(
            # As vLLM counts ranks where it takes one value for each.
            rank=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world_size=parallel.world_size_across_dp,
            tp_rank=tp.rank_in_group,
            tp_size=tp.world_size,
            pp_rank=pp.rank_in_group,
            pp_size=pp.world_size,
            dp_rank=parallel.data_parallel_index,
            dp_size=parallel.data_parallel_size,
        )

    @property
    def targets(self) -> Mapping[Target, VllmTarget]:
        """The verifier, and the draft if it has weights."""
        return MappingProxyType(self._targets)

    @property
    def gate(self) -> WorkerGate:
        """The gap between two steps."""
        return self._gate

    def watch_sleep(self, watcher: SleepWatcher) -> None:
        """Tell a watcher when vLLM puts this worker to sleep, and when it wakes it up."""
        watch_sleep(self._worker, watcher)

    def _unshare(self, names: Collection[str]) -> None:
        draft = self._targets[Target.DRAFT]
        held = [place for name in names if isinstance(place := draft.places[name], Slot)]
        packed = any(slot.module in self._shadows.modules for slot in held)
        if self.sharing is None or packed or _is_captured(self._config):
            raise UnsupportedError(
                f"{', '.join(sorted(names))} can't be cut off the verifier: "
                + ("kernels" if packed else "compiled or captured graphs")
                + " hold it in a form of their own; leave it out of the session, or start vLLM "
                "with enforce_eager, or with a draft whose checkpoint has weights of its own"
            )
        storages = {draft.layout.parameters[name].storage for name in names}
        unshare(self.sharing.draft, self.sharing.verifier, storages)
        slots = dict(named_slots(self.sharing.draft))
        dtype = self._config.speculative_config.draft_model_config.dtype
        self._derived.add(self.sharing.draft, slots, dtype)
        draft.move(slots)
        self.sharing = self.sharing.without(names)

    @contextmanager
    def agreeing(self, agree: Callable[[str], None]) -> Iterator[None]:
        """Ask before a commit within the block is final; what `agree` raises takes it back.

        It is called with what went wrong here, or with nothing.
        """
        self._agree = agree
        try:
            yield
        finally:
            self._agree = _nothing

    def committed(self, written: Written) -> CacheReset:
        """Make anew what the written parameters feed, and reset the prefix cache."""
        try:
            with set_current_vllm_config(self._config):
                self._derived.rebuild(
                    self._targets[target].places[name]
                    for target, names in written.items()
                    for name in names
                )
            if self.sharing is not None:
                self.sharing.check()
        except Exception as error:
            self._agree(str(error))
            raise
        self._agree("")
        if not outlive_requests(self._config):
            return CacheReset.NONE
        done = hasattr(self, "reset_prefix_cache") and self.reset_prefix_cache()
        return CacheReset.DONE if done else CacheReset.FAILED


def _is_captured(config: VllmConfig) -> bool:
    """Tell whether addresses or modules were taken down before the first request."""
    compilation = config.compilation_config
    return (
        compilation.mode is not CompilationMode.NONE
        or compilation.cudagraph_mode is not CUDAGraphMode.NONE
    )


def _nothing(_trouble: str) -> None:
    """Agree with nobody: there are no others."""
