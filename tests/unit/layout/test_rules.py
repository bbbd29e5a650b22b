from __future__ import annotations

import pytest

from weightsync.core.dtypes import DType
from weightsync.core.regions import Region
from weightsync.layout.plan import ParameterSpec, Placement
from weightsync.layout.rules import Rule, plan
from weightsync.layout.selections import Pad, Select, Shard
from weightsync.layout.sources import Concat, Source, Stack, Tensor, Transpose, Unstack


def spec(name: str, *shape: int, dtype: DType = DType.BFLOAT16) -> ParameterSpec:
    """Return a parameter with a storage of its own."""
    return ParameterSpec(name, dtype, shape, name)


def test_without_a_rule_names_stay() -> None:
    """A parameter that no rule matches is a tensor of its name; a pattern fits whole names."""
    layout = plan([spec("a.w", 2)], [Rule("a", Tensor("never")), Rule("w", Tensor("never"))])
    assert list(layout.tensors) == ["a.w"]


def test_the_first_rule_counts() -> None:
    """Of several rules that match, the first is used."""
    layout = plan([spec("a.w", 2)], [Rule(r"a\..*", Tensor("first")), Rule(".*", Tensor("second"))])
    assert list(layout.tensors) == ["first"]


def test_groups_are_filled_in() -> None:
    """A renamed tensor takes parts of its name from the engine's."""
    layout = plan([spec("layers.7.w", 2)], [Rule(r"layers\.(\d+)\.(.*)", Tensor(r"h.\1.\2"))])
    assert list(layout.tensors) == ["h.7.w"]


def test_rename_comes_last_and_spares_composites() -> None:
    """Names are renamed when they are finished, with or without a rule; composites stay."""
    rules = [Rule("qk", Concat((Tensor("q"), Tensor("k")), 0), composite=Tensor(r"\g<0>"))]
    layout = plan([spec("qk", 4), spec("w", 2)], rules, rename=lambda name: f"model.{name}")
    assert list(layout.tensors) == ["model.q", "model.k", "qk", "model.w"]
    assert [t.composite for t in layout.tensors.values()] == [False, False, True, False]


def test_fused_parts_of_unequal_size() -> None:
    """q, k and v lie at their own rows of the fused parameter (B51)."""
    parts = tuple(Tensor(rf"\1.{part}_proj.weight") for part in "qkv")
    layout = plan([spec("attn.qkv", 8, 4)], [Rule(r"(.*)\.qkv", Concat(parts, 0, (4, 2, 2)))])
    placed = {t.name: (t.shape, *[p.dest for p in t.placements]) for t in layout.tensors.values()}
    assert placed == {
        "attn.q_proj.weight": ((4, 4), Region((0, 0), (4, 4))),
        "attn.k_proj.weight": ((2, 4), Region((4, 0), (2, 4))),
        "attn.v_proj.weight": ((2, 4), Region((6, 0), (2, 4))),
    }


def test_stacked_experts_with_gate_and_up() -> None:
    """Expert n's gate and up lie behind each other in row n; the whole can be sent as well."""
    gate, up = (Stack(Tensor(rf"\1.*.{part}_proj.weight")) for part in ("gate", "up"))
    rule = Rule(r"(.*experts)\.gate_up_proj", Concat((gate, up), 1), composite=Tensor(r"\g<0>"))
    layout = plan([spec("m.experts.gate_up_proj", 2, 6, 4)], [rule])
    up_1 = layout.tensors["m.experts.1.up_proj.weight"]
    assert up_1.shape == (3, 4)
    assert up_1.placements == (
        Placement(
            Region.whole((3, 4)),
            "m.experts.gate_up_proj",
            Region((1, 3, 0), (1, 3, 4)),
            (None, 0, 1),
        ),
    )
    assert layout.tensors["m.experts.gate_up_proj"].composite
    assert len(layout.tensors) == 5


def test_experts_of_one_rank() -> None:
    """A worker that holds experts 4 and 5 counts from 4."""
    layout = plan([spec("w", 2, 3)], [Rule("w", Stack(Tensor("experts.*.w"), first=4))])
    assert list(layout.tensors) == ["experts.4.w", "experts.5.w"]


def test_stacks_in_stacks() -> None:
    """The stars of a name are the indices of the stacks, the outermost first."""
    source = Stack(Stack(Tensor("layer.*.expert.*.w")))
    layout = plan([spec("w", 2, 2, 3)], [Rule("w", source)])
    assert list(layout.tensors)[1] == "layer.0.expert.1.w"


def test_transposed_experts() -> None:
    """Experts that are stored the other way round keep their checkpoint shape."""
    source = Stack(Transpose(Tensor("experts.*.w"), (1, 0)))
    layout = plan([spec("w", 2, 3, 4)], [Rule("w", source)])
    tensor = layout.tensors["experts.1.w"]
    assert tensor.shape == (4, 3)
    assert tensor.placements[0].axes == (None, 1, 0)


def test_row_by_row_gate_and_up() -> None:
    """Rows that alternate in the checkpoint lie apart in the parameter (B52)."""
    rows = (range(0, 4, 2), range(1, 4, 2))
    layout = plan([spec("gate_up", 4, 2)], [Rule("gate_up", Select(Tensor("w13"), 0, rows, 4))])
    places = layout.tensors["w13"].placements
    assert [(p.source.offsets[0], p.dest.offsets[0]) for p in places] == [
        (0, 0),
        (2, 1),
        (1, 2),
        (3, 3),
    ]


def test_few_kv_heads_on_many_ranks() -> None:
    """Two kv heads on four ranks: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1 (B53)."""
    for rank, head in enumerate([0, 0, 1, 1]):
        source = Shard(Tensor("k"), 0, rank, 4, replicas=2)
        layout = plan([spec("k", 8, 16)], [Rule("k", source)])
        assert layout.tensors["k"].shape == (16, 16)
        assert layout.tensors["k"].regions == (Region((8 * head, 0), (8, 16)),)


def test_a_rank_with_nothing_but_padding() -> None:
    """A tensor of which a rank holds no row is known there, and nothing of it is needed (B50)."""
    layout = plan([spec("embed", 4, 2)], [Rule("embed", Shard(Tensor("embed"), 0, 3, 4, total=10))])
    assert layout.tensors["embed"].shape == (10, 2)
    assert layout.tensors["embed"].placements == ()
    assert layout.needed("embed") == ()


def test_contiguous_selections_are_one_box() -> None:
    """Ranges that continue each other do not break up the shard."""
    source = Select(Tensor("w"), 0, (range(2, 4), range(4, 7)), 9)
    layout = plan([spec("w", 5, 2)], [Rule("w", source)])
    assert layout.tensors["w"].regions == (Region((2, 0), (5, 2)),)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Concat((Tensor("a"), Tensor("b")), 0, (4, 1)), "do not make up 6"),
        (Concat((Tensor("a"),) * 4, 0), "into 4 equal parts"),
        (Concat((), 0), "into 0 equal parts"),
        (Concat((Tensor("a"), Tensor("b")), 0, (7, -1)), "do not make up 6"),
        (Concat((Tensor("a"),), 2), "has no dimension 2"),
        (Concat((Tensor("a"), Tensor("a")), 0, (4, 2)), "'a' would be both"),
        (Stack(Tensor("a"), dim=2), "has no dimension 2"),
        (Unstack(Tensor("a"), 0, 3, 3), "index 3 of 3"),
        (Transpose(Tensor("a"), (0,)), "no order"),
        (Select(Tensor("a"), 0, (range(5),), 9), "5 selected indices do not make 6"),
        (Select(Tensor("a"), 0, (range(6),), 5), "not all below 5"),
        (Pad(Tensor("a"), 0, 7), "7 is more than 6"),
        (Shard(Tensor("a"), 0, 2, 2), "rank 2 of 2"),
        (Shard(Tensor("a"), 0, 0, 3, replicas=2), "3 with 2 replicas"),
        (Shard(Tensor("a"), 0, 0, 2, total=13), "13 does not fit"),
        (Tensor(r"\1"), "invalid group reference"),
    ],
)
def test_faults_of_rules(source: Source, text: str) -> None:
    """A rule that can't give a parameter its shape is an error with the name and the shapes."""
    with pytest.raises(ValueError, match=rf"'p' of shape \(6, 4\): .*{text}"):
        plan([spec("p", 6, 4)], [Rule("p", source)])


@pytest.mark.parametrize(
    "second", [spec("b", 3), spec("b", 2, dtype=DType.FLOAT32)], ids=["shape", "type"]
)
def test_parameters_that_disagree(second: ParameterSpec) -> None:
    """Two parameters that ask for different shapes or types of one tensor are named."""
    with pytest.raises(ValueError, match=r"'b' of shape .*'w' .* parameter 'a'"):
        plan([spec("a", 2), second], [Rule("a|b", Tensor("w"))])


def test_a_composite_that_is_also_required() -> None:
    """A tensor can't be the only way to a parameter and a second way to another."""
    with pytest.raises(ValueError, match="composite"):
        plan([spec("a", 2), spec("w", 2)], [Rule("a", Tensor("x"), composite=Tensor("w"))])
