"""What every adapter must do, as a pytest class.

Subclass `EngineContract` in a test module, say how your engine is made and how one forward pass of
it is run, and pytest runs the rest:

    class TestMyEngine(EngineContract):
        def make_engine(self):
            return MyEngine(...)

        def forward(self, engine, target):
            return engine.step(...)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weightsync.apply.bits import storage_identity
from weightsync.apply.dtypes import from_torch
from weightsync.core.errors import EngineUnavailableError, QuarantinedError, UnsupportedError
from weightsync.core.regions import Region
from weightsync.core.types import CacheReset, Target
from weightsync.engines.base import Engine, Written
from weightsync.layout.plan import ParameterSpec

TIMEOUT = 60.0
"""Seconds after which a wait has failed; no test lasts that long."""


class EngineContract:
    """The contract between weightsync and an engine; subclass it as the module says."""

    def make_engine(self) -> Engine:
        """Return a new engine on fresh models; the same weights each time."""
        raise NotImplementedError

    def forward(self, engine: Engine, target: Target) -> torch.Tensor:
        """Run one forward pass of a target on fixed input, as the engine does when it serves.

        It must run on the calling thread's behalf: return, or raise, when the pass has ended.
        """
        raise NotImplementedError

    def close_engine(self, engine: Engine) -> None:
        """Free what `make_engine` took."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        """The engine under test."""
        engine = self.make_engine()
        yield engine
        self.close_engine(engine)

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """Threads that serve."""
        with ThreadPoolExecutor(4) as pool:
            yield pool

    # Names, layout, storage

    def test_has_models(self, engine: Engine) -> None:
        """There is at least one target, and none without tensors."""
        assert engine.targets
        for model in engine.targets.values():
            assert model.layout.tensors
        assert engine.name
        assert engine.version

    def test_layout_is_the_same_each_time(self, engine: Engine) -> None:
        """Names, shapes and places do not change between calls, nor between two engines."""
        other = self.make_engine()
        try:
            for target, model in engine.targets.items():
                assert model.layout.tensors == model.layout.tensors
                assert model.layout.tensors == other.targets[target].layout.tensors
        finally:
            self.close_engine(other)

    def test_tensors_fit_the_layout(self, engine: Engine) -> None:
        """`tensors()` holds all parameters of the layout, with their shape, dtype and storage."""
        for model in engine.targets.values():
            tensors = model.tensors()
            for name, spec in model.layout.parameters.items():
                live = tensors[name]
                assert (tuple(live.shape), from_torch(live.dtype)) == (spec.shape, spec.dtype)

    def test_equal_identities_are_one_storage(self, engine: Engine) -> None:
        """Parameters of any target have equal `storage` exactly if they are the same memory."""
        by_spec: dict[Hashable, set[Hashable]] = {}
        by_memory: dict[Hashable, set[Hashable]] = {}
        for model in engine.targets.values():
            tensors = model.tensors()
            for name, spec in model.layout.parameters.items():
                memory = storage_identity(tensors[name])
                by_spec.setdefault(spec.storage, set()).add(memory)
                by_memory.setdefault(memory, set()).add(spec.storage)
        assert all(len(group) == 1 for group in (*by_spec.values(), *by_memory.values()))

    def test_each_element_is_reached_once(self, engine: Engine) -> None:
        """Placements of tensors that are not composite neither overlap nor leave gaps.

        Padding is the exception: `layout.needed` does not have it.
        """
        for model in engine.targets.values():
            reached: dict[str, list[Region]] = {}
            for plan in model.layout.tensors.values():
                for place in plan.placements:
                    if not plan.composite:
                        reached.setdefault(place.parameter, []).append(place.dest)
            for name, spec in model.layout.parameters.items():
                count = torch.zeros(spec.shape, dtype=torch.uint8)
                for box in reached.get(name, ()):
                    count[box.slices] += 1
                needed = torch.zeros(spec.shape, dtype=torch.uint8)
                for box in model.layout.needed(name):
                    needed[box.slices] = 1
                assert torch.equal(count, needed), name

    def test_tensors_are_live(self, engine: Engine) -> None:
        """A write into `tensors()` changes the next forward pass, and is seen by the next call."""
        for target, model in engine.targets.items():
            before = self.forward(engine, target)
            with engine.gate.exclusive(TIMEOUT):
                changed = {n: _changed(t.detach()) for n, t in model.tensors().items()}
                _write(model.tensors(), changed)
                engine.committed(_all_of(engine, target))
            assert not torch.equal(_bits(before), _bits(self.forward(engine, target)))
            for name, tensor in model.tensors().items():
                assert torch.equal(_bits(tensor), _bits(changed[name])), name

    def test_a_commit_moves_nothing(self, engine: Engine) -> None:
        """Addresses, strides and objects are the same after a write and `committed`."""
        before = {t: dict(m.tensors()) for t, m in engine.targets.items()}
        places = {t: {n: x.data_ptr() for n, x in m.items()} for t, m in before.items()}
        with engine.gate.exclusive(TIMEOUT):
            for model in engine.targets.values():
                for tensor in model.tensors().values():
                    tensor.detach().copy_(tensor.detach().clone())
            assert isinstance(engine.committed(_all_of(engine, *engine.targets)), CacheReset)
        for target, model in engine.targets.items():
            after = model.tensors()
            assert all(after[name] is tensor for name, tensor in before[target].items())
            assert {n: x.data_ptr() for n, x in after.items()} == places[target]

    def test_commit_without_a_change_changes_no_output(self, engine: Engine) -> None:
        """`committed` may be called again and again; it only derives from the weights."""
        for target in engine.targets:
            before = self.forward(engine, target)
            for _ in range(2):
                with engine.gate.exclusive(TIMEOUT):
                    engine.committed(_all_of(engine, target))
            assert torch.equal(_bits(before), _bits(self.forward(engine, target)))

    # The gate

    def test_no_forward_sees_half_a_commit(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        """Forwards in a loop give the old output or the new one, never one in between."""
        target = next(iter(engine.targets))
        model = engine.targets[target]
        old = {name: tensor.detach().clone() for name, tensor in model.tensors().items()}
        new = {name: _changed(tensor) for name, tensor in old.items()}
        outputs = [_bits(self._filled(engine, target, values)) for values in (new, old)]
        stop, began = threading.Event(), threading.Semaphore(0)

        def serve() -> int:
            torn = 0
            while not stop.is_set():
                seen = _bits(self.forward(engine, target))
                torn += not any(torch.equal(seen, output) for output in outputs)
                began.release()
            return torn

        jobs = [pool.submit(serve) for _ in range(2)]
        try:
            for i in range(10):
                assert began.acquire(timeout=TIMEOUT)
                with engine.gate.exclusive(TIMEOUT):
                    _write(model.tensors(), (new, old)[i % 2])
                    engine.committed(_all_of(engine, target))
        finally:
            stop.set()
        assert not any(job.result(TIMEOUT) for job in jobs)

    def test_a_pause_holds_until_each_owner_resumed_once(
        self, engine: Engine, pool: ThreadPoolExecutor
    ) -> None:
        """Pausing twice is pausing once; two owners both hold; commits work meanwhile."""
        target = next(iter(engine.targets))
        engine.gate.pause("a", TIMEOUT)
        engine.gate.pause("a", TIMEOUT)
        engine.gate.pause("b", TIMEOUT)
        job = pool.submit(self.forward, engine, target)
        try:
            engine.gate.resume("a")
            engine.gate.resume("a")
            with engine.gate.exclusive(TIMEOUT):
                assert not job.done()
        finally:
            engine.gate.resume("b")
        job.result(TIMEOUT)

    def test_exclusive_access_is_for_one(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        """A second thread gets no access in time, and its failure leaves nothing behind."""

        def enter() -> None:
            with engine.gate.exclusive(0):
                pass

        with engine.gate.exclusive(TIMEOUT), pytest.raises(EngineUnavailableError):
            pool.submit(enter).result(TIMEOUT)
        enter()
        self.forward(engine, next(iter(engine.targets)))

    def test_quarantine_refuses_one_target(self, engine: Engine) -> None:
        """The reason is told; the verifier serves on beside a quarantined draft; None heals."""
        for target in engine.targets:
            engine.gate.quarantine(target, "half of it was written")
            with pytest.raises(QuarantinedError, match="half of it was written"):
                self.forward(engine, target)
            if target is Target.DRAFT and Target.VERIFIER in engine.targets:
                self.forward(engine, Target.VERIFIER)
            engine.gate.quarantine(target, None)
            self.forward(engine, target)

    # Sharing

    def test_unshare_keeps_values_and_inner_ties(self, engine: Engine) -> None:
        """Afterwards no storage is shared with the verifier, the verifier has not changed."""
        if set(engine.targets) != set(Target):
            pytest.skip("one model only")
        verifier, draft = engine.targets[Target.VERIFIER], engine.targets[Target.DRAFT]
        mine = {spec.storage for spec in verifier.layout.parameters.values()}
        shared = [n for n, spec in draft.layout.parameters.items() if spec.storage in mine]
        if not shared:
            pytest.skip("nothing is shared")
        ties = _ties(draft.layout.parameters)
        held = dict(verifier.tensors())
        outputs = {t: self.forward(engine, t) for t in Target}
        with engine.gate.exclusive(TIMEOUT):
            draft.unshare(shared)
        assert all(verifier.tensors()[name] is tensor for name, tensor in held.items())
        mine = {spec.storage for spec in verifier.layout.parameters.values()}
        assert not mine & {spec.storage for spec in draft.layout.parameters.values()}
        assert _ties(draft.layout.parameters) == ties
        for target in Target:
            assert torch.equal(_bits(outputs[target]), _bits(self.forward(engine, target)))

    # Sleep, for engines that can

    def test_sleep_holds_forwards_and_keeps_weights(
        self, engine: Engine, pool: ThreadPoolExecutor
    ) -> None:
        """Level 1: a forward waits for `wake_up` and gives the same output then."""
        sleep, wake_up = _sleeper(engine)
        target = next(iter(engine.targets))
        before = self.forward(engine, target)
        ties = _ties(engine.targets[target].layout.parameters)
        sleep(1)
        job = pool.submit(self.forward, engine, target)
        with engine.gate.exclusive(TIMEOUT):
            assert not job.done()
        wake_up()
        assert torch.equal(_bits(before), _bits(job.result(TIMEOUT)))
        assert _ties(engine.targets[target].layout.parameters) == ties
        wake_up()

    def test_deep_sleep_keeps_buffers(self, engine: Engine) -> None:
        """Level 2: after the parameters were written again, all outputs are the old ones."""
        sleep, wake_up = _sleeper(engine)
        before = {target: self.forward(engine, target) for target in engine.targets}
        parameters = {
            target: {
                name: tensor.detach().clone()
                for name, tensor in model.tensors().items()
                if isinstance(tensor, torch.nn.Parameter)
            }
            for target, model in engine.targets.items()
        }
        sleep(2)
        wake_up()
        with engine.gate.exclusive(TIMEOUT):
            for target, model in engine.targets.items():
                _write(model.tensors(), parameters[target])
            engine.committed(_all_of(engine, *engine.targets))
        for target, output in before.items():
            assert torch.equal(_bits(output), _bits(self.forward(engine, target)))

    def test_an_unknown_tag_wakes_nothing(self, engine: Engine) -> None:
        """It is refused, and a wake of all works afterwards."""
        sleep, wake_up = _sleeper(engine)
        target = next(iter(engine.targets))
        before = self.forward(engine, target)
        sleep(1)
        with pytest.raises(UnsupportedError, match="nonsense"):
            wake_up(["nonsense"])
        wake_up()
        assert torch.equal(_bits(before), _bits(self.forward(engine, target)))

    def test_an_unknown_sleep_level_is_refused(self, engine: Engine) -> None:
        """Nothing happens but a clear error."""
        sleep, _ = _sleeper(engine)
        with pytest.raises(UnsupportedError, match="7"):
            sleep(7)
        self.forward(engine, next(iter(engine.targets)))

    def _filled(
        self, engine: Engine, target: Target, values: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        with engine.gate.exclusive(TIMEOUT):
            _write(engine.targets[target].tensors(), values)
            engine.committed(_all_of(engine, target))
        return self.forward(engine, target)


def _all_of(engine: Engine, *targets: Target) -> Written:
    return {target: set(engine.targets[target].layout.parameters) for target in targets}


def _ties(parameters: Mapping[str, ParameterSpec]) -> set[frozenset[str]]:
    names: dict[Hashable, set[str]] = {}
    for name, spec in parameters.items():
        names.setdefault(spec.storage, set()).add(name)
    return {frozenset(group) for group in names.values()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    return 0.25 - tensor / 2 if tensor.is_floating_point() else tensor.clone()


def _write(live: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        live[name].detach().copy_(value)


def _sleeper(engine: Engine) -> tuple[Callable[[int], None], Callable[..., None]]:
    sleep, wake_up = getattr(engine, "sleep", None), getattr(engine, "wake_up", None)
    if sleep is None or wake_up is None:
        pytest.skip("the engine can't sleep")
    return sleep, wake_up
