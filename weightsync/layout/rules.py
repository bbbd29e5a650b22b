"""Which checkpoint tensors make up which engine parameters, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from weightsync.layout.plan import Layout, ParameterSpec, Placement, TensorPlan
from weightsync.layout.sources import Assembly, Scope, Source, Tensor


@dataclass(frozen=True, slots=True)
class Rule:
    r"""What the parameters of some names are made of.

    A renamed tensor is `Rule(r"transformer\.(.*)", Tensor(r"model.\1"))`; stacked experts with
    gate and up in one are

        gate, up = (Stack(Tensor(rf"\1.*.{part}_proj.weight")) for part in ("gate", "up"))
        Rule(r"(.*\.experts)\.gate_up_proj", Concat((gate, up), dim=1), Tensor(r"\g<0>"))

    Attributes:
        pattern: Regular expression for the engine's name, from its first to its last character.
        source: What the parameter is made of, under checkpoint names.
        composite: Another way to send the same elements, e.g. the parameter under its own name,
            for a trainer that has the engine's modules.
    """

    pattern: str
    source: Source
    composite: Source | None = None
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compile the pattern."""
        object.__setattr__(self, "_compiled", re.compile(self.pattern))

    def match(self, name: str) -> re.Match[str] | None:
        """Match an engine name."""
        return self._compiled.fullmatch(name)


def plan(
    parameters: Iterable[ParameterSpec],
    rules: Sequence[Rule] = (),
    *,
    rename: Callable[[str], str] = str,
) -> Layout:
    """Make the layout of a model: each parameter by the first rule that matches its name.

    Args:
        parameters: What the engine holds.
        rules: Tried in order; a parameter without one is a tensor of the same name.
        rename: From names as the rules give them (or the engine, without a rule) to those of the
            checkpoint; composites keep their names.

    Raises:
        ValueError: a rule that does not fit a parameter, or parameters that ask for different
            shapes or types of one tensor.
    """
    specs = list(parameters)
    tensors: dict[str, _Draft] = {}
    for spec in specs:
        _add(tensors, spec, rules, rename)
    return Layout.of(specs, (draft.finish(name) for name, draft in tensors.items()))


@dataclass(slots=True)
class _Draft:
    """A tensor plan while its parameters are being gathered."""

    spec: ParameterSpec
    shape: tuple[int, ...]
    composite: bool
    placements: list[Placement] = field(default_factory=list)

    def finish(self, name: str) -> TensorPlan:
        placements = tuple(self.placements)
        return TensorPlan(name, self.spec.dtype, self.shape, placements, self.composite)


def _add(
    tensors: dict[str, _Draft],
    spec: ParameterSpec,
    rules: Sequence[Rule],
    rename: Callable[[str], str],
) -> None:
    try:
        for rule in rules:
            if match := rule.match(spec.name):
                scope = Scope(spec.name, match.expand)
                _collect(
                    tensors, spec, rule.source.build(spec.shape, replace(scope, rename=rename))
                )
                if rule.composite is not None:
                    built = rule.composite.build(spec.shape, scope)
                    _collect(tensors, spec, built, composite=True)
                return
        _collect(
            tensors, spec, Tensor(spec.name).build(spec.shape, Scope(spec.name, rename=rename))
        )
    except (ValueError, re.error) as error:
        raise ValueError(f"parameter {spec.name!r} of shape {spec.shape}: {error}") from error


def _collect(
    tensors: dict[str, _Draft], spec: ParameterSpec, assembly: Assembly, *, composite: bool = False
) -> None:
    for name, shape in assembly.tensors.items():
        draft = tensors.setdefault(name, _Draft(spec, shape, composite))
        if (draft.shape, draft.spec.dtype, draft.composite) != (shape, spec.dtype, composite):
            raise ValueError(
                f"its tensor {name!r} is {spec.dtype} {shape}{' composite' * composite}, but "
                f"{draft.spec.dtype} {draft.shape}{' composite' * draft.composite} "
                f"for parameter {draft.spec.name!r}"
            )
    for name, place in assembly.pieces:
        tensors[name].placements.append(place)
