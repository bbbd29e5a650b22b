from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightsync_client import NameMapping

from weightsync.core.errors import InvalidRequestError, UnknownTensorError
from weightsync.core.types import Target

KNOWN = {"fc.weight", "fc.bias", "ln.rbias", "embed.weight"}


def resolve(name: str, mapping: NameMapping | None = None, known: set[str] = KNOWN) -> str | None:
    """Resolve a name for a verifier."""
    return (mapping or NameMapping()).resolve(name, Target.VERIFIER, known)


@pytest.mark.parametrize(
    "wrappers", [*itertools.permutations(["module", "_orig_mod", "_fsdp_wrapped_module"])]
)
def test_wrapper_prefixes_stack_in_any_order(wrappers: tuple[str, ...]) -> None:
    """B30: DDP and compile prefixes are stripped in whatever order they come."""
    assert resolve(".".join((*wrappers, "fc.weight"))) == "fc.weight"


def test_fsdp_parts_are_stripped_at_every_level() -> None:
    """B29: the wrapper's part goes wherever it stands, by whole path parts only."""
    assert resolve("_fsdp_wrapped_module.fc._fsdp_wrapped_module.weight") == "fc.weight"
    with pytest.raises(UnknownTensorError):
        resolve("my_fsdp_wrapped_module.fc.weight")


def test_a_real_child_of_a_wrappers_name_stays() -> None:
    """B30: a name that fits is taken as it is, and no more is stripped than needed."""
    known = {"module.weight", "weight"}
    assert resolve("module.weight", known=known) == "module.weight"
    assert resolve("module.module.weight", known=known) == "module.weight"
    assert resolve("_orig_mod.module.weight", known=known - {"weight"}) == "module.weight"


def test_a_name_that_could_be_two_tensors_is_refused() -> None:
    """Two ways to strip as little that fit two tensors are an error that names both."""
    with pytest.raises(
        InvalidRequestError, match=r"module\.fc.*fc\._orig_mod|fc\._orig_mod.*module\.fc"
    ):
        resolve("module.fc._orig_mod", known={"module.fc", "fc._orig_mod"})


def test_peft_base_weights_reach_parameters_and_buffers() -> None:
    """B26, B28: PEFT's root and base_layer are stripped, for buffers too."""
    assert resolve("base_model.model.fc.base_layer.weight") == "fc.weight"
    assert resolve("base_model.model.ln.base_layer.rbias") == "ln.rbias"


def test_an_adapters_own_weights_are_refused_with_the_remedy() -> None:
    """B26: lora weights never land anywhere; the error says to merge or to ignore them."""
    with pytest.raises(UnknownTensorError, match="merge"):
        resolve("base_model.model.fc.lora_A.default.weight")


def test_only_the_chosen_copy_of_a_saved_module_is_sent() -> None:
    """B27: of several copies only the adapter's lands, other copies are left out."""
    prefix = "base_model.model.fc"
    assert resolve(f"{prefix}.modules_to_save.default.weight") == "fc.weight"
    assert resolve(f"{prefix}.modules_to_save.ref.weight") is None
    assert resolve(f"{prefix}.original_module.weight") is None
    chosen = NameMapping(adapter="ref")
    assert resolve(f"{prefix}.modules_to_save.ref.weight", chosen) == "fc.weight"


def test_prefix_rules_bridge_nested_models() -> None:
    """B23, B24: an explicit rule maps one tree onto another, by whole path parts."""
    nested = {"language_model.model.fc.weight", "visual.fc.weight"}
    mapping = NameMapping(rules=(("model", "language_model.model"),))
    assert resolve("model.fc.weight", mapping, nested) == "language_model.model.fc.weight"
    assert resolve("module.model.fc.weight", mapping, nested) == "language_model.model.fc.weight"
    with pytest.raises(UnknownTensorError):
        resolve("models.fc.weight", mapping, nested)
    outer = NameMapping(rules=(("model.language_model", "language_model"),))
    known = {"language_model.fc.weight"}
    assert resolve("model.language_model.fc.weight", outer, known) == "language_model.fc.weight"
    assert resolve("fc.weight", NameMapping(rules=(("", "model"),)), {"model.fc.weight"})


def test_an_unknown_name_is_told_with_the_closest_one() -> None:
    """B23: the error names the bad name and the closest match."""
    with pytest.raises(UnknownTensorError, match=r"fcc\.weight.*'fc\.weight'"):
        resolve("fcc.weight")


@given(
    st.sampled_from(sorted(KNOWN)),
    st.lists(
        st.tuples(
            st.sampled_from(["module", "_orig_mod", "_fsdp_wrapped_module", "base_layer"]),
            st.integers(0, 2),
        ),
        max_size=6,
    ),
)
def test_any_wrapping_of_a_known_name_is_undone(name: str, inserted: list[tuple[str, int]]) -> None:
    """Whatever wrapper parts are put into a name, it resolves to the name itself."""
    parts = name.split(".")
    for part, position in inserted:
        parts.insert(min(position, len(parts)), part)
    assert resolve(".".join(parts)) == name
