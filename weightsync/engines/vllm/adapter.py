"""The engine around a vLLM worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.model_loader.utils import get_draft_load_config

from weightsync.apply.bits import storage_identity
from weightsync.apply.dtypes import from_torch
from weightsync.core.errors import UnsupportedError
from weightsync.core.types import CacheReset, Coordinates, Target
from weightsync.engines.base import SleepWatcher, Written
from weightsync.engines.naming import parameter_spec
from weightsync.engines.vllm.checkpoint import Checkpoint, TensorForm
from weightsync.engines.vllm.derived import Derived
from weightsync.engines.vllm.gate import WorkerGate
from weightsync.engines.vllm.record import Record, record
from weightsync.engines.vllm.shadow import Shadows
from weightsync.engines.vllm.sleep import CALLS, watch_sleep
from weightsync.engines.vllm.slots import Slot, named_slots
from weightsync.layout.plan import Layout, ParameterSpec, TensorPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class VllmTarget:
    """A `TargetModel` of a vLLM worker: parameters, or their shadows, by vLLM's names."""

    def __init__(self, slots: Mapping[str, Slot], layout: Layout, shadows: Shadows) -> None:
        """Take what `VllmEngine` has found out about a model."""
        self.slots = slots
        self._layout = layout
        self._shadows = shadows

    @property
    def layout(self) -> Layout:
        """Where the checkpoint's tensors lie."""
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what commits write: parameters, or shadows where kernels hold another form."""
        return {name: self._shadows.tensor(self.slots[name]) for name in self._layout.parameters}

    def unshare(self, names: Collection[str]) -> None:
        """Refuse: vLLM's draft holds the verifier's modules themselves.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"vLLM shares {', '.join(sorted(names))} with the verifier as whole modules, which "
            "can't be told apart while it runs; start it with a draft whose checkpoint has weights "
            "of its own"
        )


class VllmEngine:
    """An `Engine` around the models of one worker process.

    Make it when the models are loaded and before the first step.
    """

    name = "vllm"
    sleep_calls = CALLS
    reset_prefix_cache: Callable[[], bool]

    def __init__(
        self,
        worker: Any,  # noqa: ANN401 - the worker class of any device
        reset_cache: Callable[[], bool] | None = None,
    ) -> None:
        """Learn how checkpoints become parameters, and put the worker under the gate.

        Args:
            worker: `vllm.v1.worker.gpu_worker.Worker` or a subclass, after `load_model`.
            reset_cache: Drops prefixes that were computed with old weights; returns whether it
                does. They belong to vLLM's scheduler, in another process.

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
        self._targets = {Target.VERIFIER: self._target(worker.get_model(), config)}
        draft = worker.get_draft_model()
        if isinstance(draft, nn.Module):
            self._targets[Target.DRAFT] = self._target(draft, config, draft=True)

    def _target(self, model: nn.Module, config: VllmConfig, *, draft: bool = False) -> VllmTarget:
        model_config, load_config = config.model_config, config.load_config
        if draft:
            model_config = config.speculative_config.draft_model_config
            load_config = get_draft_load_config(config)
        with Checkpoint(model_config, load_config) as checkpoint, set_current_vllm_config(config):
            forms = checkpoint.forms()
            found = record(model, forms)
            slots = dict(named_slots(model))
            self._shadows.add(slots, found, checkpoint)
        self._derived.add(model, slots, model_config.dtype)
        layout = _layout(found, forms, slots, self._shadows)
        return VllmTarget(slots, layout, self._shadows)

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
                    self._targets[target].slots[name]
                    for target, names in written.items()
                    for name in names
                )
        except Exception as error:
            self._agree(str(error))
            raise
        self._agree("")
        if not self._config.cache_config.enable_prefix_caching:
            return CacheReset.NONE
        done = hasattr(self, "reset_prefix_cache") and self.reset_prefix_cache()
        return CacheReset.DONE if done else CacheReset.FAILED


def _nothing(_trouble: str) -> None:
    """Agree with nobody: there are no others."""


def _layout(
    found: Record, forms: Mapping[str, TensorForm], slots: Mapping[str, Slot], shadows: Shadows
) -> Layout:
    """Put the parts together: the parameters that tensors reach, under each of their names."""
    reached = {storage_identity(shadows.tensor(slot)) for slot in shadows.known}
    specs = []
    for name, slot in slots.items():
        tensor = shadows.tensor(slot)
        if name in found.forms or (tensor.numel() and storage_identity(tensor) in reached):
            specs.append(parameter_spec(name, tensor))
    tensors = []
    for name, places in found.placements.items():
        dtype = found.forms[places[0].parameter].dtype if places else forms[name].dtype
        tensors.append(TensorPlan(name, from_torch(dtype), forms[name].shape, tuple(places)))
    return Layout.of(specs, [*tensors, *_tied(specs, tensors)])


def _tied(specs: Sequence[ParameterSpec], tensors: Sequence[TensorPlan]) -> Iterator[TensorPlan]:
    """Yield a tensor of a second name, as state dicts have it, e.g. for a head that is tied."""
    reached = Counter(place.parameter for plan in tensors for place in plan.placements)
    whole = {
        plan.placements[0].parameter: plan
        for plan in tensors
        if len(plan.placements) == 1 and reached[plan.placements[0].parameter] == 1
    }
    owners = {spec.storage: whole[spec.name] for spec in specs if spec.name in whole}
    taken = {plan.name for plan in tensors}
    for spec in specs:
        if not reached[spec.name] and spec.name not in taken and spec.storage in owners:
            owner = owners[spec.storage]
            places = tuple(replace(place, parameter=spec.name) for place in owner.placements)
            yield replace(owner, name=spec.name, placements=places)
