from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from weightsync.apply.bits import bits
from weightsync.apply.gather import as_source
from weightsync.core.errors import UnsupportedError
from weightsync.core.regions import Region
from weightsync.engines.vllm.checkpoint import TensorForm
from weightsync.engines.vllm.derived import Derived
from weightsync.engines.vllm.expected import expected, form_of
from weightsync.engines.vllm.record import Group, record
from weightsync.engines.vllm.reloads import reloads
from weightsync.engines.vllm.shadow import Shadows
from weightsync.engines.vllm.slots import Slot, named_slots
from weightsync.layout.plan import Placement

CONTIGUOUS = torch.contiguous_format
Weights = Iterable[tuple[str, torch.Tensor]]

FORMS = {
    "q": TensorForm(torch.float32, (4, 2)),
    "k": TensorForm(torch.float32, (2, 2)),
    "unused": TensorForm(torch.int64, (7,)),
}


class Fused(nn.Module):
    """A model that loads two tensors into one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.arange(12.0).view(6, 2), requires_grad=False)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Weights) -> None:
        """Load a checkpoint."""
        places = {"q": slice(0, 4), "k": slice(4, 6)}
        for name, tensor in weights:
            if name in places:
                self.load_one(self.qk.data[places[name]], tensor)

    def load_one(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Load one tensor."""
        place.copy_(tensor)


class Summing(Fused):
    """A model that keeps something that it computes, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.qk.sum()

    def load_weights(self, weights: Weights) -> None:
        """Load a checkpoint."""
        super().load_weights(weights)
        self.total = self.qk.sum()


def test_what_is_copied_where_is_found_out() -> None:
    """Each tensor has its place in the parameter; one that is not used has none."""
    found = record(Fused(), FORMS)
    whole, rows = Region.whole((4, 2)), Region.whole((2, 2))
    assert found.placements == {
        "q": [Placement(whole, "qk", whole, (0, 1))],
        "k": [Placement(rows, "qk", Region((4, 0), (2, 2)), (0, 1))],
        "unused": [],
    }
    assert found.forms == {"qk": TensorForm(torch.float32, (6, 2))}


def test_the_model_stays_as_it_is() -> None:
    """Parameters, their values, and what was derived from them are the same objects as before."""
    model = Summing()
    before = (model.qk, model.qk.data_ptr(), model.total)
    record(model, FORMS)
    assert model.qk is before[0]
    assert model.qk.data_ptr() == before[1]
    assert model.total is before[2]
    assert model.qk.tolist() == torch.arange(12.0).view(6, 2).tolist()


@pytest.mark.parametrize(
    "load_one",
    [
        lambda place, tensor: place.copy_(tensor.exp()),
        lambda place, tensor: place.copy_(tensor).mul_(2),
        lambda place, tensor: place.copy_(tensor.mul_(2)),
        lambda place, tensor: place.copy_(tensor[:1]),
        lambda place, tensor: place[::2].copy_(tensor[::2]),
    ],
    ids=["computed", "computed there", "computed before", "repeated", "every second row"],
)
def test_what_is_no_copy_of_a_box_is_loaded_by_the_model(
    monkeypatch: pytest.MonkeyPatch, load_one: Any
) -> None:
    """All tensors that reach the module are told; the others keep their places."""
    model = Fused()
    monkeypatch.setattr(model, "load_one", load_one)
    found = record(model, FORMS)
    assert found.groups == [Group((model,), ("q", "k"))]
    assert found.placements == {"unused": []}
    assert not model.qk.is_meta
    assert model.qk.tolist() == torch.arange(12.0).view(6, 2).tolist()


@pytest.mark.parametrize(
    "load_one",
    [
        lambda place, tensor: place.copy_(tensor.t().contiguous().t()),
        lambda place, tensor: place.t().copy_(tensor.t().contiguous()),
        lambda place, tensor: place[1:].copy_(tensor.t().clone(memory_format=CONTIGUOUS).t()[:-1]),
    ],
    ids=["transposed and back", "transposed", "a part"],
)
def test_a_clone_is_followed(monkeypatch: pytest.MonkeyPatch, load_one: Any) -> None:
    """What is copied by way of a clone is placed where the loader puts it."""
    model = Fused()
    monkeypatch.setattr(model, "load_one", load_one)
    found = record(model, FORMS)
    tensors = {"q": torch.rand(4, 2), "k": torch.rand(2, 2)}
    placed = torch.zeros(6, 2)
    for name, tensor in tensors.items():
        for placement in found.placements[name]:
            as_source(placed, placement).copy_(bits(tensor[placement.source.slices]))
    model.qk.zero_()
    model.load_weights(tensors.items())
    assert placed.tolist() == model.qk.tolist()


@pytest.mark.parametrize(("dtype", "is_computed"), [(torch.float32, False), (torch.bfloat16, True)])
def test_what_is_rounded_on_the_way_is_computed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_computed: bool
) -> None:
    """Unless it is rounded to the type of the parameter, where it would be rounded anyhow."""
    model = Fused()
    monkeypatch.setattr(model, "load_one", lambda place, t: place.copy_(t.to(dtype).clone()))
    forms = {name: TensorForm(torch.float64, form.shape) for name, form in FORMS.items()}
    assert bool(record(model, forms).groups) is is_computed


def test_a_parameter_that_is_replaced_is_loaded_by_the_model() -> None:
    """A loader may put another parameter in the place of one, which no copy tells of."""

    class Replacing(Fused):
        def load_weights(self, weights: Weights) -> None:
            both = torch.cat([tensor for name, tensor in weights if name in {"q", "k"}])
            self.qk = nn.Parameter(both, requires_grad=False)

    model = Replacing()
    assert record(model, FORMS).groups == [Group((model,), ("q", "k"))]


def test_what_a_loader_keeps_in_an_attribute_is_computed() -> None:
    """The tensors that it is computed from are loaded by the model."""
    model = Summing()
    assert record(model, FORMS).groups == [Group((model,), ("q", "k"))]


def test_what_is_sent_is_loaded_into_what_is_there() -> None:
    """Parameters and plain attributes get other values where they lie, and nothing else does."""
    model = Summing()
    values = torch.arange(12.0).view(6, 2)
    checkpoint: Any = Values(q=values[:4], k=values[4:])
    shadows = Shadows()
    (reload,) = reloads(model, record(model, FORMS).groups, checkpoint, shadows)
    before = (model.qk, model.qk.data_ptr(), model.total, model.total.data_ptr())
    assert not shadows.modules

    derived = Derived(shadows)
    derived.add_reloads([reload])
    reload.sent["k"].tensor.fill_(100)
    derived.rebuild([reload.sent["k"]])
    assert model.qk.tolist() == [*values[:4].tolist(), [100, 100], [100, 100]]
    assert model.total.item() == values[:4].sum() + 400
    assert (model.qk, model.qk.data_ptr(), model.total, model.total.data_ptr()) == before


def test_what_can_not_be_loaded_alone_is_refused() -> None:
    """A model that wants more tensors than those of the layer is named, and the tensors."""

    class Wanting(Summing):
        def load_weights(self, weights: Weights) -> None:
            named = dict(weights)
            if "unused" not in named:
                raise KeyError("unused")
            super().load_weights(named.items())

    model = Wanting()
    checkpoint: Any = Values(q=torch.zeros(4, 2), k=torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match=r"Wanting computes with q, k .* alone"):
        reloads(model, record(model, FORMS).groups, checkpoint, Shadows())


def test_a_loader_that_looks_at_values_is_followed_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole model is loaded by itself."""
    model = Fused()
    monkeypatch.setattr(model, "load_one", lambda _place, tensor: tensor.tolist())
    assert record(model, FORMS).groups == [Group((model,), tuple(FORMS))]


def test_a_constant_in_padding_is_no_computation() -> None:
    """What a loader fills in beside the checkpoint's tensors changes nothing."""

    class Padded(Fused):
        def load_one(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
            place.fill_(0)
            place.copy_(tensor)

    assert not record(Padded(), FORMS).groups


def test_what_has_a_tensor_in_common_is_loaded_together() -> None:
    """A module that copies what another one computes with is loaded with it; a third is not."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled, self.copied, self.apart = (nn.Linear(2, 2, bias=False) for _ in range(3))
            record_metadata_for_reloading(self)

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                if name == "one":
                    self.scaled.weight.data.copy_(tensor * 2)
                    self.copied.weight.data.copy_(tensor)
                else:
                    self.apart.weight.data.copy_(tensor)

    model = Three()
    form = TensorForm(torch.float32, (2, 2))
    found = record(model, {"one": form, "two": form})
    (group,) = found.groups
    assert set(group.modules) == {model.scaled, model.copied}
    assert group.tensors == ("one",)
    assert list(found.placements) == ["two"]
    assert list(found.forms) == ["apart.weight"]


def test_a_model_that_does_not_load_itself_is_refused() -> None:
    """Nothing can be learnt from it."""
    with pytest.raises(UnsupportedError, match="Linear has no load_weights"):
        record(nn.Linear(2, 2), FORMS)


class Values:
    """A checkpoint in memory."""

    loaded = True

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def form(self, name: str) -> TensorForm:
        """Return type and shape of a tensor."""
        return form_of(self._tensors[name])

    def read(self, name: str, region: Region) -> torch.Tensor:
        """Return a region of a tensor."""
        return self._tensors[name][region.slices]


def shadows_of(model: Fused, live: torch.Tensor) -> Shadows:
    """Return the shadows of a model whose parameter is `live`, not what its checkpoint says."""
    found = record(model, FORMS)
    values = torch.arange(12.0).view(6, 2)
    model.qk = nn.Parameter(live, requires_grad=False)
    shadows = Shadows()
    checkpoint: Any = Values(q=values[:4], k=values[4:])
    shadows.add(expected(found, dict(named_slots(model)), checkpoint))
    return shadows


@pytest.mark.parametrize(
    "live",
    [
        torch.arange(12.0).view(6, 2).flip(0),
        torch.arange(12.0).view(2, 6),
        torch.arange(12.0, dtype=torch.float64).view(6, 2),
        torch.empty(0),
    ],
    ids=["reordered", "reshaped", "widened", "dropped"],
)
def test_what_is_not_the_checkpoint_gets_a_shadow(live: torch.Tensor) -> None:
    """Whatever a module has made of its weights, the shadow has them as they were loaded."""
    model = Fused()
    shadow = shadows_of(model, live).tensor(Slot(model, "qk"))
    assert shadow is not model.qk
    assert shadow.tolist() == torch.arange(12.0).view(6, 2).tolist()


def test_what_is_the_checkpoint_needs_no_shadow() -> None:
    """There the parameter itself is what commits write."""
    model = Fused()
    shadows = shadows_of(model, torch.arange(12.0).view(6, 2))
    assert shadows.tensor(Slot(model, "qk")) is model.qk


def test_a_module_that_can_not_be_made_anew_is_refused() -> None:
    """A module that has changed its weights, and does not say how, is named."""
    model = Fused()
    shadows = shadows_of(model, torch.empty(0))
    with pytest.raises(UnsupportedError, match="Fused"):
        Derived(shadows).add(model, dict(named_slots(model)), torch.float32)
