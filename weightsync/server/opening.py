"""What a session needs before its first byte: may it be opened, and where will its bytes lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from weightsync.apply.bits import live_memory
from weightsync.apply.cast import cast
from weightsync.apply.checks import Live
from weightsync.arena.arena import Arena, ArenaBudget, Arenas, Bytes
from weightsync.arena.placing import ArenaPlan
from weightsync.arena.staging import Memory, Staging
from weightsync.core.errors import (
    BaseVersionMismatchError,
    EngineUnavailableError,
    InvalidRequestError,
    QuarantinedError,
    TargetAbsentError,
    UnsupportedError,
)
from weightsync.core.session import Session
from weightsync.core.trace import Trace
from weightsync.core.types import (
    Scope,
    SharedTensorPolicy,
    Target,
    TargetState,
    Transport,
    UpdateMode,
    UpdateRequest,
)
from weightsync.engines.base import Engine
from weightsync.layout.plan import Layout, ParameterSpec
from weightsync.layout.shares import ParameterKey
from weightsync.server.commit import Commit
from weightsync.server.models import Models
from weightsync.server.update import Update

_ALIGNMENT = 64
"""Blocks begin at cache lines, so that no copy starts in the middle of one."""


def known(engine: Engine, targets: Iterable[Target]) -> list[Target]:
    """Return targets in order.

    Raises:
        TargetAbsentError: the worker does not have one of them.
    """
    have = engine.targets
    wanted = sorted(targets, key=lambda target: target.value)
    for target in wanted:
        if target not in have:
            names = ", ".join(str(t) for t in have) or "none"
            raise TargetAbsentError(
                f"this worker has no {target} with weights (it has: {names}); nothing was changed",
                subjects=[str(target)],
            )
    return wanted


def modes(live: Live) -> tuple[UpdateMode, ...]:
    """Return the modes that the engine's tensors allow: in place only what the CPU can write."""
    on_cpu = all(t.device.type == "cpu" for tensors in live.values() for t in tensors.values())
    return (UpdateMode.STAGED, UpdateMode.IN_PLACE) if on_cpu else (UpdateMode.STAGED,)


def check(request: UpdateRequest, models: Models) -> None:
    """Refuse a session that could not be finished.

    Raises:
        InvalidRequestError, UnsupportedError, QuarantinedError, EngineUnavailableError,
        BaseVersionMismatchError: as they say.
    """
    if not request.targets:
        raise InvalidRequestError("targets is empty; name at least one", subjects=["targets"])
    if not request.weight_version:
        raise InvalidRequestError(
            "weight_version is empty; name what the targets will hold",
            subjects=["weight_version"],
        )
    _check_way(request, models)
    for target in request.targets:
        record = models.records[target]
        if record.state is TargetState.ASLEEP:
            raise EngineUnavailableError(
                f"the engine sleeps: wake it up before the {target} is updated", retry_after=1.0
            )
        if record.state is TargetState.QUARANTINED and request.scope is not Scope.FULL:
            raise QuarantinedError(
                f"the {target} is quarantined ({record.quarantine_reason}); only a FULL session"
                " heals it",
                subjects=[str(target)],
            )
    _check_base(request, models)


def _check_way(request: UpdateRequest, models: Models) -> None:
    if request.mode is UpdateMode.IN_PLACE:
        if UpdateMode.IN_PLACE not in modes(models.live()):
            raise UnsupportedError(
                "IN_PLACE writes weights in host memory, and this engine's lie on a device; use"
                " STAGED"
            )
        if request.shared_tensors is not SharedTensorPolicy.REFUSE:
            raise UnsupportedError(
                "IN_PLACE can neither compare nor unshare shared tensors; use STAGED"
            )


def _check_base(request: UpdateRequest, models: Models) -> None:
    for target, version in request.expected_base_versions:
        base = models.records.get(target)
        held = base.weight_version if base is not None else None
        if held != version:
            raise BaseVersionMismatchError(
                f"the {target} holds version {held or '(unset)'!r}, not {version!r}; read"
                " GetWorker and base the update on that",
                subjects=[str(target)],
                weight_version=held or "",
            )


def make(
    session: Session,
    engine: Engine,
    models: Models,
    *,
    budget: ArenaBudget,
    arenas: Arenas,
    trace: Trace,
) -> Update:
    """Make the parts of an opened session.

    Raises:
        InvalidRequestError: a bad pattern.
        ArenaFullError: it would not fit.
    """
    request, plan = session.request, models.plan
    arena: Arena | None
    if request.mode is UpdateMode.IN_PLACE:
        live = models.live()
        staging = Staging(
            request,
            layouts=plan.layouts,
            shares=plan.shares,
            memory=lambda key, _spec: live_memory(live[key.target][key.name]),
            budget=ArenaBudget(plan_bytes(plan.layouts)),
            cast=cast,
        )
        arena = None
    else:
        shared = session.transport is Transport.SHARED_MEMORY
        arena, arena_plan, memory = _lay_out(
            request, plan.layouts, arenas, request.shared_memory_id if shared else ""
        )
        try:
            staging = Staging(
                request,
                layouts=plan.layouts,
                shares=plan.shares,
                memory=memory,
                budget=budget,
                cast=cast,
                arena=arena_plan if shared else None,
                release=lambda: arenas.give_back(arena),
            )
        except BaseException:
            arenas.give_back(arena)
            raise
    return Update(
        session,
        plan,
        staging,
        Commit(
            engine,
            plan=plan,
            request=request,
            staging=staging,
            live=models.live,
            trace=trace.bound(session_id=session.session_id),
        ),
        arena,
    )


def plan_bytes(layouts: Mapping[Target, Layout]) -> int:
    """Return the bytes of all parameters, each name counted."""
    return sum(spec.nbytes for layout in layouts.values() for spec in layout.parameters.values())


def _lay_out(
    request: UpdateRequest, layouts: Mapping[Target, Layout], arenas: Arenas, client: str
) -> tuple[Arena, ArenaPlan, Memory]:
    """Give every parameter that the session may write its place; only written pages take memory."""
    keys = [
        (ParameterKey(target, spec.name), spec)
        for target in sorted(request.targets, key=lambda t: t.value)
        for spec in layouts[target].parameters.values()
    ]
    ends = itertools.accumulate(-(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT for _, spec in keys)
    offsets = dict(zip((key for key, _ in keys), (0, *ends), strict=False))
    size = max((offsets[key] + spec.nbytes for key, spec in keys), default=0)
    arena = arenas.take(size, client)

    def memory(key: ParameterKey, spec: ParameterSpec) -> Bytes:
        view = arena.view(offsets[key], spec.nbytes)
        return view.reshape(*spec.shape, spec.dtype.itemsize)

    return arena, ArenaPlan(size, offsets), memory
