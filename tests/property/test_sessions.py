"""A worker under any sequence of calls keeps its promises: a model of it runs beside it."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from tests.worker.feeding import fresh, push, request, same_bits, unchanged
from weightsync.core.errors import (
    CommitRolledBackError,
    IncompleteError,
    NothingAppliedError,
    SessionStateError,
    SharedWeightError,
    TargetBusyError,
)
from weightsync.core.types import Scope, SessionState, Target
from weightsync.engines.modules import ModuleEngine
from weightsync.server.worker import Worker
from weightsync.testing.models import tiny_pair

SHARED = ("embed.weight", "head.weight")
NAMES = ("rbias", *SHARED, "fc.weight", "fc.bias", "ln.weight", "ln.bias")
TARGETS = st.sampled_from([(Target.VERIFIER,), (Target.DRAFT,), (Target.VERIFIER, Target.DRAFT)])


class Session:
    """What the model knows of a session."""

    def __init__(self, targets: tuple[Target, ...], scope: Scope, version: str) -> None:
        self.targets = targets
        self.scope = scope
        self.version = version
        self.state = SessionState.OPEN
        self.sent: dict[tuple[Target, str], torch.Tensor] = {}

    def needs(self) -> set[tuple[Target, str]]:
        """Return what a FULL session must bring."""
        return {
            (target, name)
            for target in self.targets
            for name in NAMES
            if target is Target.VERIFIER or name not in SHARED
        }


class WorkerMachine(RuleBasedStateMachine):
    """Sessions of all kinds, with failures, against a dictionary of what must be live."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.verifier, self.draft = tiny_pair()
        self.worker = Worker(ModuleEngine(self.verifier, self.draft))
        self.models = {Target.VERIFIER: self.verifier, Target.DRAFT: self.draft}
        self.live = {
            target: {n: t.detach().clone() for n, t in model.state_dict().items()}
            for target, model in self.models.items()
        }
        self.versions = dict.fromkeys(self.models, "")
        self.open: dict[str, Session] = {}
        self.count = 0
        self.fail = False
        self.worker.trace.add(self._hook)

    def _hook(self, step: str, facts: dict[str, object]) -> None:
        if self.fail and step == "share.checked":
            self.fail = False
            raise OSError("injected")

    @rule(target=sessions, wanted=TARGETS, scope=st.sampled_from(Scope))
    def start(self, wanted: tuple[Target, ...], scope: Scope) -> object:
        """A start succeeds exactly if no open session holds one of its targets."""
        self.count += 1
        held = {t for s in self.open.values() for t in s.targets}
        try:
            info = self.worker.start(request(*wanted, scope=scope, version=f"v{self.count}"))
        except TargetBusyError:
            assert held & set(wanted)
            return multiple()
        assert not held & set(wanted)
        self.open[info.session_id] = Session(wanted, scope, f"v{self.count}")
        return info.session_id

    @rule(
        session_id=sessions,
        name=st.sampled_from(NAMES),
        seed=st.integers(0, 3),
        draft=st.booleans(),
    )
    def write(self, session_id: str, name: str, seed: int, draft: bool) -> None:
        """A tensor is taken by an open session that has its target, unless it is protected."""
        session = self.open.get(session_id)
        target = Target.DRAFT if draft else Target.VERIFIER
        if session is None or session.state is not SessionState.OPEN:
            try:
                push(self.worker, session_id, target, {})
            except SessionStateError:
                return
            raise AssertionError("an ended session takes streams")
        if target not in session.targets:
            target = session.targets[0]
        key = (Target.VERIFIER if name in SHARED and len(session.targets) == 2 else target, name)
        # An element is sent once per session: other bytes for it would be a conflict.
        value = session.sent.get(key, fresh({name: self.live[target][name]}, seed)[name])
        try:
            push(self.worker, session_id, target, {name: value})
        except SharedWeightError:
            assert session.targets == (Target.DRAFT,)
            assert name in SHARED
            return
        session.sent[key] = value

    @rule(session_id=sessions)
    def prepare(self, session_id: str) -> None:
        """Prepare succeeds exactly on sessions that are complete."""
        session = self.open.get(session_id)
        if session is not None and self._try(session, self.worker.prepare, session_id):
            session.state = SessionState.PREPARED

    @rule(session_id=sessions, fail=st.booleans())
    def finish(self, session_id: str, fail: bool) -> None:
        """Finish makes all of a session live, or, if the commit fails, nothing."""
        session = self.open.get(session_id)
        if session is None:
            return
        self.fail = fail
        try:
            if not self._try(session, self.worker.finish, session_id):
                return
        except CommitRolledBackError:
            assert fail
            del self.open[session_id]
            return
        finally:
            self.fail = False
        assert not fail
        for (target, name), value in session.sent.items():
            for live in self.live if name in SHARED else (target,):
                self.live[live][name] = value
        for target in session.targets:
            self.versions[target] = session.version
        del self.open[session_id]

    def _try(self, session: Session, call: object, session_id: str) -> bool:
        complete = (
            session.needs() <= set(session.sent)
            if session.scope is Scope.FULL
            else bool(session.sent)
        )
        try:
            call(session_id)  # type: ignore[operator]
        except (IncompleteError, NothingAppliedError):
            assert not complete
            return False
        assert complete
        return True

    @rule(session_id=consumes(sessions))
    def abort(self, session_id: str) -> None:
        """Abort drops a session and may be repeated."""
        if self.open.pop(session_id, None) is not None:
            assert self.worker.abort(session_id).state is SessionState.ABORTED
            assert self.worker.abort(session_id).state is SessionState.ABORTED

    @precondition(lambda self: not self.open)
    @rule()
    def nothing_is_kept(self) -> None:
        """Without open sessions no arena byte is in use."""
        assert self.worker.staging_bytes == 0

    @invariant()
    def live_weights_are_what_was_committed(self) -> None:
        """Both models, their versions and their tie are at all times what the model says."""
        for target, model in self.models.items():
            assert unchanged(model, self.live[target])
        assert {s.target: s.weight_version for s in self.worker.info().targets} == self.versions
        assert self.draft.embed.weight is self.verifier.embed.weight
        assert same_bits(self.draft.head.weight, self.verifier.head.weight)

    def teardown(self) -> None:
        """Stop the worker."""
        self.worker.close()


TestWorker = WorkerMachine.TestCase
TestWorker.settings = settings(max_examples=60, stateful_step_count=30)
