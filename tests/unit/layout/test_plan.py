from __future__ import annotations

import pytest

from weightsync.core.dtypes import DType
from weightsync.core.regions import Region
from weightsync.layout.plan import Layout, ParameterSpec, Placement, TensorPlan

ROWS = Region((0, 0), (4, 3))
HEAD = ParameterSpec("head", DType.BFLOAT16, (6, 3), "storage")


def plan(*placements: Placement, dtype: DType = DType.BFLOAT16) -> TensorPlan:
    """Return a tensor of four rows of three."""
    return TensorPlan("w", dtype, (4, 3), placements)


@pytest.mark.parametrize(
    ("source", "dest", "axes"),
    [
        (ROWS, Region((0, 0), (4, 2)), (0, 1)),
        (ROWS, Region((0, 0), (4, 3)), (1, 0)),
        (ROWS, Region((0, 0), (4, 4)), (0, 0)),
        (ROWS, Region((0,), (4,)), (0,)),
        (ROWS, Region((0, 0), (4, 3)), (0,)),
        (ROWS, Region((0, 0, 0), (2, 4, 3)), (None, 0, 1)),
    ],
)
def test_a_placement_that_does_not_fit_itself(
    source: Region, dest: Region, axes: tuple[int | None, ...]
) -> None:
    """Boxes that hold different elements are refused when the placement is made."""
    with pytest.raises(ValueError, match="does not map"):
        Placement(source, "head", dest, axes)


@pytest.mark.parametrize(
    "placement",
    [
        Placement(ROWS, "head", Region((3, 0), (4, 3)), (0, 1)),
        Placement(Region((2, 0), (4, 3)), "head", Region((0, 0), (4, 3)), (0, 1)),
        Placement(Region((0, 0, 0), (1, 1, 3)), "head", Region((0, 0), (1, 3)), (0, 2)),
    ],
)
def test_a_placement_outside_its_arrays(placement: Placement) -> None:
    """A layout refuses boxes that leave the parameter or the tensor."""
    with pytest.raises(ValueError, match=r"'w'.*leaves"):
        Layout.of([HEAD], [plan(placement)])


def test_types_must_agree() -> None:
    """A tensor has the type of the parameter that it lies in."""
    placement = Placement(ROWS, "head", ROWS, (0, 1))
    with pytest.raises(ValueError, match="float32"):
        Layout.of([HEAD], [plan(placement, dtype=DType.FLOAT32)])


def test_identity_layout() -> None:
    """Without rules a parameter is a tensor of its name, also without dimensions or elements."""
    specs = [
        ParameterSpec("scalar", DType.INT64, (), 1),
        ParameterSpec("empty", DType.FLOAT32, (0, 4), 2),
        HEAD,
    ]
    layout = Layout.identity(specs)
    assert list(layout.tensors) == ["scalar", "empty", "head"]
    for spec in specs:
        tensor = layout.tensors[spec.name]
        assert (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape)
        assert tensor.regions == layout.needed(spec.name) == (Region.whole(spec.shape),)


def test_padding_is_not_needed() -> None:
    """A parameter needs the boxes that tensors reach, each once, and no others (B50)."""
    placement = Placement(ROWS, "head", ROWS, (0, 1))
    layout = Layout.of([HEAD], [plan(placement, placement)])
    assert layout.needed("head") == (ROWS,)


def test_regions_of_a_shard() -> None:
    """A tensor tells the regions that the worker holds, a copy in two places once."""
    top = Region((0, 0), (2, 3))
    twice = plan(
        Placement(top, "head", top, (0, 1)),
        Placement(top, "head", Region((2, 0), (2, 3)), (0, 1)),
    )
    assert twice.regions == (top,)
