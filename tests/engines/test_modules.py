from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from weightsync.core.errors import UnsupportedError
from weightsync.core.types import CacheReset, Target
from weightsync.engines.modules import ModuleEngine
from weightsync.engines.naming import named_tensors, unwrap
from weightsync.layout.rules import Rule
from weightsync.layout.sources import Concat, Tensor
from weightsync.testing.models import Tiny, tiny_pair

V, D = Target.VERIFIER, Target.DRAFT
TOKENS = torch.arange(10)


class Wrapped(nn.Module):
    """A model with a child that is really called `module`."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.module = child


def compiled(module: nn.Module) -> nn.Module:
    """Compile a module without a compiler."""
    result = torch.compile(module, backend="eager")
    assert isinstance(result, nn.Module)
    return result


def test_names_are_those_of_the_state_dict() -> None:
    """Parameters and persistent buffers, in order; buffers outside of checkpoints do not occur."""
    model = Tiny()
    assert list(named_tensors(model)) == list(model.state_dict())
    assert "rbias" in named_tensors(model)
    assert "rot" not in named_tensors(model)


def test_ties_show_under_each_name() -> None:
    """B21: one parameter in two places, and two parameters over one storage, are ties."""
    model = Tiny()
    model.head.weight = model.embed.weight
    model.fc.bias = nn.Parameter(model.ln.bias.detach())
    specs = ModuleEngine(model).targets[V].layout.parameters
    assert specs["head.weight"].storage == specs["embed.weight"].storage
    assert specs["fc.bias"].storage == specs["ln.bias"].storage
    assert len({spec.storage for spec in specs.values()}) == len(specs) - 2


def test_slices_of_one_buffer_are_no_ties() -> None:
    """B22: parameters that lie side by side in one storage are each alone."""
    flat = torch.zeros(8)
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(flat[:4].view(2, 2))
    model.bias = nn.Parameter(flat[4:6])
    specs = ModuleEngine(model).targets[V].layout.parameters
    assert len({spec.storage for spec in specs.values()}) == 2


def test_empty_tensors_are_no_ties() -> None:
    """B43: tensors without elements have no memory to share."""
    model = nn.Module()
    model.one, model.two = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    specs = ModuleEngine(model).targets[V].layout.parameters
    assert specs["one"].storage != specs["two"].storage


def test_wrappers_are_seen_by_what_they_are() -> None:
    """B30: compilation and data parallelism at any depth leave no trace in names."""
    inner = Tiny()
    names = list(named_tensors(inner))
    assert list(named_tensors(compiled(nn.DataParallel(inner)))) == names
    assert list(named_tensors(nn.DataParallel(compiled(inner)))) == names
    assert unwrap(compiled(nn.DataParallel(inner))) is inner
    nested = nn.Sequential(compiled(nn.Linear(2, 2)))
    assert list(named_tensors(nested)) == ["0.weight", "0.bias"]


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_wrappers_are_seen_and_shards_are_refused(world: None) -> None:
    """B30: DDP leaves no trace in names; a DTensor, which has no address, is refused by name."""
    model = compiled(DistributedDataParallel(nn.Linear(2, 2)))
    assert list(named_tensors(model)) == ["weight", "bias"]
    sharded = nn.Linear(2, 2)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedError, match=r"'weight' has no memory of its own \(DTensor"):
        ModuleEngine(sharded)


def test_a_child_that_is_called_like_a_wrapper_stays() -> None:
    """B30: a real child called `module` is in the names."""
    assert "module.fc.weight" in named_tensors(Wrapped(Tiny()))
    assert "module.fc.weight" in named_tensors(compiled(Wrapped(compiled(Tiny()))))


def test_a_drafter_without_weights_is_no_target() -> None:
    """B03, B04: there is no draft target, rather than one that falls back on the verifier."""
    assert set(ModuleEngine(Tiny()).targets) == {V}
    assert set(ModuleEngine(None, Tiny()).targets) == {D}
    with pytest.raises(ValueError, match="needs a verifier, a draft, or both"):
        ModuleEngine()


def test_models_that_can_not_be_updated_are_refused_by_name() -> None:
    """A tensor without memory, or of a type outside the contract, is named at the start."""
    with pytest.raises(UnsupportedError, match=r"'weight' has no memory.* on meta"):
        ModuleEngine(nn.Linear(2, 2, device="meta"))
    model = nn.Module()
    model.register_buffer("packed", torch.empty(2, dtype=torch.bits8))
    with pytest.raises(UnsupportedError, match=r"'packed'.*bits8"):
        ModuleEngine(model)


def test_rules_are_kept_per_target() -> None:
    """The verifier's fused parameter is two tensors, the draft's of the same name is one."""
    rule = Rule(r"(.*)fc\.weight", Concat((Tensor(r"\1gate"), Tensor(r"\1up")), dim=0))
    engine = ModuleEngine(*tiny_pair(), rules={V: [rule]})
    assert {"gate", "up"} <= engine.targets[V].layout.tensors.keys()
    assert "fc.weight" in engine.targets[D].layout.tensors


def test_commit_hooks_run_in_order() -> None:
    """B66, B67: derived values first, then the cache; what became of the cache is told."""
    calls: list[object] = []
    results = iter([True, False])

    def reset() -> bool:
        calls.append("reset")
        return next(results)

    engine = ModuleEngine(
        Tiny(), rebuild=lambda written: calls.append(set(written)), reset_cache=reset
    )
    assert engine.committed({V: ["fc.weight"]}) is CacheReset.DONE
    assert engine.committed({V: ["fc.weight"]}) is CacheReset.FAILED
    assert calls == [{V}, "reset", {V}, "reset"]
    assert ModuleEngine(Tiny()).committed({V: ["fc.weight"]}) is CacheReset.NONE


def test_unshare_keeps_inner_ties_classes_and_attributes() -> None:
    """B14, B70: tied parameters stay one object, of their class and with their attributes."""

    class Loaded(nn.Parameter):
        pass

    verifier, draft = tiny_pair()
    verifier.embed.weight = Loaded(verifier.embed.weight.detach(), requires_grad=False)
    verifier.embed.weight.loader = "mine"  # type: ignore[attr-defined]
    draft.embed.weight = draft.head.weight = verifier.head.weight = verifier.embed.weight
    ModuleEngine(verifier, draft).targets[D].unshare(["embed.weight"])
    own = draft.embed.weight
    assert own is draft.head.weight
    assert own is not verifier.embed.weight
    assert verifier.head.weight is verifier.embed.weight
    assert type(own) is Loaded
    assert own.loader == "mine"  # type: ignore[attr-defined]
    assert not own.requires_grad
    assert torch.equal(own.view(torch.uint8), verifier.embed.weight.view(torch.uint8))


def test_unshare_parts_two_parameters_over_one_storage() -> None:
    """B21: the looser kind of sharing is found and cut, too."""
    verifier, draft = tiny_pair(shared=False)
    draft.head.weight = nn.Parameter(verifier.head.weight.detach())
    ModuleEngine(verifier, draft).targets[D].unshare(["head.weight"])
    assert draft.head.weight.data_ptr() != verifier.head.weight.data_ptr()


def test_unshare_parts_a_module_that_both_hold() -> None:
    """B06: the draft gets a module of its own; the verifier's is not touched."""
    verifier, draft = tiny_pair(shared=False)
    draft.embed = verifier.embed
    held = verifier.embed, verifier.embed.weight
    expected = draft(TOKENS)
    ModuleEngine(verifier, draft).targets[D].unshare(["embed.weight"])
    assert (verifier.embed, verifier.embed.weight) == held
    assert draft.embed is not verifier.embed
    with torch.no_grad():
        verifier.embed.weight.zero_()
        assert torch.equal(draft(TOKENS), expected)


def test_unshare_refuses_a_draft_inside_the_verifier() -> None:
    """A head that is a module of the verifier can't have other values than it."""
    verifier = Wrapped(Tiny())
    engine = ModuleEngine(verifier, verifier.module)
    with pytest.raises(UnsupportedError, match="the draft is a module of the verifier"):
        engine.targets[D].unshare(["fc.weight"])


def test_sleep_frees_the_memory_and_refuses_what_it_can_not_free() -> None:
    """Storages of all parameters are empty while asleep; foreign memory is refused by name."""
    model = Tiny()
    engine = ModuleEngine(model)
    engine.sleep(1)
    assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    assert model.rbias.untyped_storage().nbytes()
    engine.wake_up()
    foreign = nn.Linear(2, 2)
    foreign.weight = nn.Parameter(torch.frombuffer(bytearray(16), dtype=torch.float32).view(2, 2))
    engine = ModuleEngine(foreign)
    with pytest.raises(UnsupportedError, match="'weight' is not torch's own"):
        engine.sleep(1)
    foreign(torch.zeros(2))


def test_a_deeper_sleep_from_a_light_one_drops_the_copy() -> None:
    """Level 2 after level 1 forgets the parameters; sharing between the models survives."""
    verifier, draft = tiny_pair()
    engine = ModuleEngine(verifier, draft)
    engine.sleep(1)
    engine.sleep(1)
    engine.sleep(2)
    engine.wake_up()
    with torch.no_grad():
        verifier.head.weight.fill_(3)
    assert (draft.head.weight == 3).all()


def test_only_an_engine_with_a_cache_can_reset_it() -> None:
    """The control is there if a function for it was given, and passes on its answer."""
    assert not hasattr(ModuleEngine(Tiny()), "reset_prefix_cache")
    assert ModuleEngine(Tiny(), reset_cache=lambda: False).reset_prefix_cache() is False


def test_a_closed_engine_leaves_the_modules_alone() -> None:
    """Quarantine has no effect behind `close`, and copies of a served module work before it."""
    model = Tiny()
    engine = ModuleEngine(model)
    copy.deepcopy(model)(TOKENS)
    engine.gate.quarantine(V, "stale")
    engine.close()
    model(TOKENS)
