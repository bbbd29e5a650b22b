"""Where weights that a draft may share with its verifier are found in a model."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import torch
from torch import nn

from weightsync.loader.compare import is_plain
from weightsync.loader.slots import Slot, slots_of
from weightsync.loader.wrappers import call_accessor, language_model, strip_wrappers, unwrap


class Place(str, enum.Enum):
    """A kind of place, by its role in the model."""

    INPUT_EMBEDDING = "input_embedding"
    OUTPUT_HEAD = "output_head"
    LAYER_HEAD = "layer_head"
    """Heads of single MTP layers (`layers.N.shared_head.head`) and of Medusa (`lm_heads.N`), each
    beside the verifier's head."""
    INDEX_BUFFER = "index_buffer"
    """Scratch space for indices (sparse attention), held by many modules."""
    OTHER = "other"
    """Any parameter elsewhere."""

    def __str__(self) -> str:
        """Return the word as reports use it."""
        return self.value


class Holding(enum.Enum):
    """What stands at a module's place."""

    EMPTY = enum.auto()
    """The attribute is there and holds None: the model expects the module of another."""
    STAND_IN = enum.auto()
    """A module without tensors, as engines put where a pipeline stage does not own the layer."""
    TABLE = enum.auto()
    """A module that computes with `weight` (and `bias`) alone; the weight may be None."""
    PACKED = enum.auto()
    """A quantized or otherwise special layer, with other tensors beside or instead of `weight`."""


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """An embedding or a head, wrappers taken off.

    Attributes:
        slot: The attribute that holds it; its name is the path of the module inside wrappers.
        module: The module; None if the slot is empty.
    """

    slot: Slot
    module: nn.Module | None

    @property
    def holding(self) -> Holding:
        """What stands here."""
        if self.module is None:
            return Holding.EMPTY
        saved = {slot.attribute for slot in self.tensor_slots() if slot.saved}
        weight = getattr(self.module, "weight", self)
        if not saved and weight is self:
            return Holding.STAND_IN
        if saved <= {"weight", "bias"} and (weight is None or _is_table(weight)):
            return Holding.TABLE
        return Holding.PACKED

    def tensor_slots(self) -> list[Slot]:
        """Return the slots of the tensors that it holds itself."""
        if self.module is None:
            return []
        return list(slots_of(self.module, self.slot.name))

    def tensor_slot(self, attribute: str) -> Slot | None:
        """Return the slot of one attribute, which may hold None; None if there is none."""
        if self.module is None or not hasattr(self.module, attribute):
            return None
        return Slot(f"{self.slot.name}.{attribute}", self.module, attribute)


_EMBEDDING_NAMES = (
    "embed_tokens",
    "embedding",
    "wte",
    "word_embeddings",
    "tok_embeddings",
    "token_embedding",
    "embed_in",
    "embed",
)
_HEAD_NAMES = ("lm_head", "embed_out", "output_layer", "output", "unembed", "head")
_SHARED_HEAD = re.compile(r"(^|\.)layers\.[^.]+\.shared_head$")
_LISTED_HEAD = re.compile(r"(^|\.)lm_heads\.[^.]+$")
_INDEX_BUFFER = "topk_indices_buffer"


def find_embedding(root: nn.Module) -> ModulePlace | None:
    """Return the input embedding; None if the model has no such place."""
    return _find(root, "get_input_embeddings", _EMBEDDING_NAMES)


def find_head(root: nn.Module) -> ModulePlace | None:
    """Return the output head; None if the model has no such place."""
    return _find(root, "get_output_embeddings", _HEAD_NAMES)


def find_layer_heads(root: nn.Module) -> list[ModulePlace]:
    """Return the heads of single layers, in the order of the layers."""
    paths = _Paths(root)
    found: dict[int, ModulePlace] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        inner = unwrap(module)
        if _LISTED_HEAD.search(strip_wrappers(path)):
            found[id(inner)] = paths.place_of(inner)
        elif _SHARED_HEAD.search(strip_wrappers(path)) and hasattr(inner, "head"):
            found[id(inner)] = paths.place_of_attribute(inner, "head")
    return list(found.values())


def find_index_buffers(root: nn.Module) -> list[Slot]:
    """Return all slots for an index buffer: registered, a plain attribute, or still None."""
    found: list[Slot] = []
    for path, module in root.named_modules(remove_duplicate=False):
        if getattr(module, _INDEX_BUFFER, module) is None:
            name = f"{path}.{_INDEX_BUFFER}" if path else _INDEX_BUFFER
            found.append(Slot(name, module, _INDEX_BUFFER, saved=False))
        found += (slot for slot in slots_of(module, path) if slot.attribute == _INDEX_BUFFER)
    return found


def own_copy_flag(root: nn.Module, place: Place) -> bool | None:
    """Return what the draft declares about a copy of its own; None if it declares nothing."""
    name = "has_own_embed_tokens" if place is Place.INPUT_EMBEDDING else "has_own_lm_head"
    for model in (root, language_model(root)):
        flag = getattr(model, name, None)
        if isinstance(flag, bool):
            return flag
    return None


class _Paths:
    """The path of each module in a model."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._paths: dict[int, str] = {id(module): path for path, module in root.named_modules()}

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._paths

    def place_of(self, module: nn.Module) -> ModulePlace:
        inner = unwrap(module)
        return ModulePlace(self._slot(self._paths[id(inner)]), inner)

    def place_of_attribute(self, parent: nn.Module, attribute: str) -> ModulePlace:
        module = getattr(parent, attribute)
        if module is not None:
            return self.place_of(module)
        path = self._paths[id(parent)]
        return ModulePlace(self._slot(f"{path}.{attribute}" if path else attribute), None)

    def _slot(self, path: str) -> Slot:
        parent, _, attribute = path.rpartition(".")
        return Slot(path, self._root.get_submodule(parent), attribute)


def _find(root: nn.Module, accessor: str, names: tuple[str, ...]) -> ModulePlace | None:
    paths = _Paths(root)
    scopes = list(dict.fromkeys((language_model(root), root)))
    for scope in scopes:
        found = call_accessor(scope, accessor)
        if found is not None and found in paths:
            return paths.place_of(found)
    named = [_find_by_name(paths, scope, names) for scope in scopes if scope in paths]
    places = [place for place in named if place is not None]
    # What a language model leaves empty may be held by the model around it.
    return next((place for place in places if place.module is not None), next(iter(places), None))


def _find_by_name(paths: _Paths, scope: nn.Module, names: tuple[str, ...]) -> ModulePlace | None:
    # With duplicates: a tied head may be the embedding module itself, under a second name.
    modules = [
        (strip_wrappers(path), module)
        for path, module in scope.named_modules(remove_duplicate=False)
        if path and _may_be_vocabulary(unwrap(module))
    ]
    modules.sort(key=lambda item: item[0].count("."))  # stable: the shallowest first
    parents = dict.fromkeys(map(unwrap, (scope, *scope.children())))
    for name in names:
        for path, module in modules:
            parent, _, last = path.rpartition(".")
            if last == name and not _SHARED_HEAD.search(parent):
                return paths.place_of(module)
        for owner in parents:
            if owner in paths and getattr(owner, name, owner) is None:
                return paths.place_of_attribute(owner, name)
    return None


def _is_table(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.is_floating_point() and is_plain(weight)


def _may_be_vocabulary(module: nn.Module) -> bool:
    """Tell a table, or what stands for it, from a container or a norm of that name."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight.dim() == 2  # noqa: PLR2004 - vocabulary x width
    return not any(True for _ in module.children())
