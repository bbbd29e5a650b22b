"""The engine's models as they are now: layouts, storages, and what was written when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from weightsync.core.coverage import Coverage
from weightsync.core.regions import Region
from weightsync.core.types import Target, TargetState
from weightsync.engines.base import Engine
from weightsync.layout.plan import Layout, TensorPlan
from weightsync.layout.shares import ParameterKey, Shares


@dataclass(slots=True)
class TargetRecord:
    """What a target is known to hold.

    Attributes:
        weight_version: In the words of the last commit; empty: unset.
        state: Whether it may serve.
        quarantine_reason: Why not, if it may not.
        num_commits: Since the worker started.
        last_commit_time: Unix seconds; 0 before the first.
        written: Elements that commits have written since the worker started or woke, by
            parameter.
        num_unwritten: Number of tensors that are not wholly written; None: to be counted.
    """

    weight_version: str = ""
    state: TargetState = TargetState.READY
    quarantine_reason: str = ""
    num_commits: int = 0
    last_commit_time: float = 0.0
    written: dict[str, Coverage] = field(default_factory=dict)
    num_unwritten: int | None = None


@dataclass(frozen=True)
class Plan:
    """Layouts and shares that belong together."""

    layouts: Mapping[Target, Layout]
    shares: Shares


class Models:
    """The models of an engine and the record of each.

    Not thread-safe: the worker's lock guards it.
    """

    def __init__(self, engine: Engine) -> None:
        """Read the engine's layouts."""
        self._engine = engine
        self.records = {target: TargetRecord() for target in engine.targets}
        layouts = {target: model.layout for target, model in engine.targets.items()}
        self._plan = Plan(layouts, Shares(layouts))

    @property
    def plan(self) -> Plan:
        """The layouts as they were read last."""
        return self._plan

    def refresh(self) -> Plan:
        """Read the layouts anew: an engine may have replaced a tensor meanwhile."""
        layouts = {target: model.layout for target, model in self._engine.targets.items()}
        if any(self._plan.layouts[target] is not layout for target, layout in layouts.items()):
            self._plan = Plan(layouts, Shares(layouts))
        return self._plan

    def live(self) -> dict[Target, Mapping[str, torch.Tensor]]:
        """Return the live tensors of every target."""
        return {target: model.tensors() for target, model in self._engine.targets.items()}

    def is_written(self, target: Target, tensor: TensorPlan) -> bool:
        """Tell whether commits have written every element of a tensor."""
        written = self.records[target].written
        return all(
            placement.dest.numel == 0
            or ((p := written.get(placement.parameter)) is not None and p.covers(placement.dest))
            for placement in tensor.placements
        )

    def num_unwritten(self, target: Target) -> int:
        """Return the number of tensors that are not wholly written, composites not counted."""
        record = self.records[target]
        if record.num_unwritten is None:
            record.num_unwritten = sum(
                not self.is_written(target, tensor)
                for tensor in self._plan.layouts[target].tensors.values()
                if not tensor.composite
            )
        return record.num_unwritten

    def mark_written(self, plan: Plan, key: ParameterKey, boxes: list[Region]) -> None:
        """Note what a commit has written into a storage, under each of its names."""
        for member in plan.shares.members(key):
            record = self.records[member.target]
            coverage = record.written.setdefault(member.name, Coverage())
            for box in boxes:
                coverage.add(box)
            record.num_unwritten = None

    def forget_weights(self) -> None:
        """Note that all weights were dropped: versions are unset, nothing is written."""
        for record in self.records.values():
            record.weight_version = ""
            record.written.clear()
            record.num_unwritten = None
