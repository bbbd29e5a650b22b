"""The engine for plain torch modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from weightsync.core.errors import UnsupportedError
from weightsync.core.types import CacheReset, Coordinates, Limits, Target
from weightsync.engines.base import WEIGHTS, Written
from weightsync.engines.gate import StepGate
from weightsync.engines.memory import SleepingMemory
from weightsync.engines.naming import named_tensors, parameter_spec, unwrap
from weightsync.engines.unshare import unshare
from weightsync.layout.plan import Layout, ParameterSpec
from weightsync.layout.rules import Rule, plan

_SLEEP = "sleep"


class ModuleTarget:
    """A `TargetModel` that is a torch module."""

    def __init__(
        self,
        module: nn.Module,
        make_layout: Callable[[Sequence[ParameterSpec]], Layout],
        verifier: nn.Module | None = None,
    ) -> None:
        """Take a model.

        Args:
            module: The model.
            make_layout: Finds the checkpoint tensors of what the model holds.
            verifier: The model with which it may share storage.
        """
        self.module = module
        self._make_layout = make_layout
        self._verifier = verifier
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        """Where checkpoint tensors lie in the module's parameters and persistent buffers.

        Raises:
            UnsupportedError: a tensor on the meta device, or of a type outside the contract.
        """
        if self._layout is None:
            self._layout = self._make_layout(
                [parameter_spec(n, t) for n, t in self.tensors().items()]
            )
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live parameters and persistent buffers, tied ones under each name."""
        return named_tensors(self.module)

    def unshare(self, names: Collection[str]) -> None:
        """Give parameters a storage of their own, with equal values, cutting them off the verifier.

        Raises:
            UnsupportedError: this model is a part of the verifier.
        """
        if self._verifier is not None:
            storages = {self.layout.parameters[name].storage for name in names}
            unshare(unwrap(self.module), self._verifier, storages)
            self.forget_layout()

    def forget_layout(self) -> None:
        """Look at the storages anew when the layout is asked for again."""
        self._layout = None


class ModuleEngine:
    """An `Engine` around one or two torch modules that live in this process.

    Forward passes are the calls of the modules, from any thread, compiled or not. A model's own
    loop around other calls must use `gate.step(target)`.

    Attributes:
        reset_prefix_cache: The `reset_cache` that was given; absent without one, as this control
            then is.
    """

    reset_prefix_cache: Callable[[], bool]

    def __init__(
        self,
        verifier: nn.Module | None = None,
        draft: nn.Module | None = None,
        *,
        coordinates: Coordinates | None = None,
        rules: Mapping[Target, Sequence[Rule]] = MappingProxyType({}),
        rebuild: Callable[[Written], None] | None = None,
        reset_cache: Callable[[], bool] | None = None,
        name: str = "torch",
    ) -> None:
        """Put modules under the gate.

        Args:
            verifier: The policy, as the object that is called (a compiled wrapper, not its inside).
            draft: The draft; None if the drafter has no weights.
            coordinates: Place of this worker among its peers; default: alone.
            rules: How checkpoint tensors relate to parameters, where names and shapes differ.
            rebuild: Called under the gate after a commit's last write with the targets that
                changed, to derive what is computed from weights.
            reset_cache: Drops results of old weights; returns whether it did.
            name: Short name of the engine.

        Raises:
            ValueError: neither model was given, or rules do not fit.
            UnsupportedError: a tensor on the meta device, or of a type outside the contract.
        """
        models = {Target.VERIFIER: verifier, Target.DRAFT: draft}
        modules = {target: module for target, module in models.items() if module is not None}
        if not modules:
            raise ValueError("an engine needs a verifier, a draft, or both")
        self._name = name
        self._coordinates = coordinates or Coordinates()
        self._rules = rules
        self._rebuild = rebuild
        self._reset_cache = reset_cache
        if reset_cache is not None:
            self.reset_prefix_cache = reset_cache
        self._gate = StepGate()
        self._memory: SleepingMemory | None = None
        self._targets = {
            target: ModuleTarget(
                module,
                partial(self._plan, target),
                verifier if target is Target.DRAFT else None,
            )
            for target, module in modules.items()
        }
        for model in self._targets.values():
            model.layout  # noqa: B018 - faults show at the start, not in the first session
        for target, module in modules.items():
            # Both ends of a chain of wrappers: methods such as `generate` call the inner one.
            for callee in dict.fromkeys((module, unwrap(module))):
                self._gate.attach(callee, target)

    def _plan(self, target: Target, parameters: Sequence[ParameterSpec]) -> Layout:
        return plan(parameters, self._rules.get(target, ()))

    @property
    def name(self) -> str:
        """Short name of the adapter."""
        return self._name

    @property
    def version(self) -> str:
        """Version of torch."""
        return str(torch.__version__)

    @property
    def coordinates(self) -> Coordinates:
        """Place of this worker among its peers."""
        return self._coordinates

    @property
    def targets(self) -> Mapping[Target, ModuleTarget]:
        """The models that were given."""
        return MappingProxyType(self._targets)

    @property
    def gate(self) -> StepGate:
        """The gap between two forward passes."""
        return self._gate

    def committed(self, written: Written) -> CacheReset:
        """Rebuild what is derived from weights, and reset the cache."""
        if self._rebuild is not None:
            self._rebuild(written)
        if self._reset_cache is None:
            return CacheReset.NONE
        return CacheReset.DONE if self._reset_cache() else CacheReset.FAILED

    def sleep(self, level: int) -> None:
        """Free the memory of all parameters and hold forward passes until `wake_up`.

        Buffers stay on their device. Tensors keep their identity, not their address.

        Args:
            level: 1 keeps a copy of the parameters in host memory, 2 drops them.

        Raises:
            UnsupportedError: an unknown level, or memory that is not torch's own.
            EngineUnavailableError: no step boundary in time; nothing was freed.
        """
        if level not in (1, 2):
            raise UnsupportedError(f"sleep level {level} is unknown; there are 1 and 2")
        timeout = Limits().gate_timeout
        with self._gate.exclusive(timeout):
            if self._memory is None:
                modules = [model.module for model in self._targets.values()]
                self._memory = SleepingMemory(modules, keep=level == 1)
                self._gate.pause(_SLEEP, timeout)
            elif level == 2:  # noqa: PLR2004 - deeper, from level 1
                self._memory.forget()

    def wake_up(self, tags: Collection[str] = ()) -> None:
        """Bring the memory back; parameters have undefined contents after level 2. Idempotent.

        Args:
            tags: There is only one, the weights; none: all.

        Raises:
            UnsupportedError: another tag; the engine sleeps on.
            EngineUnavailableError: the gate was not to be had in time; the engine sleeps on.
        """
        for tag in tags:
            if tag != WEIGHTS:
                raise UnsupportedError(f"nothing here sleeps as {tag!r}; there is {WEIGHTS!r}")
        with self._gate.exclusive(Limits().gate_timeout):
            if self._memory is None:
                return
            self._memory.restore()
            self._memory = None
            for model in self._targets.values():
                model.forget_layout()
        self._gate.resume(_SLEEP)

    def close(self) -> None:
        """Take the gate off the modules; they run on without it."""
        self._gate.detach()
