from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from weightsync_client import (  # noqa: E402
    Fleet,
    FleetError,
    Outcome,
    SendOptions,
    push_model,
    verify,
)

from tests.client.live import Proxy, Tiny, bits, tiny  # noqa: E402
from weightsync.core.errors import (  # noqa: E402
    BaseVersionMismatchError,
    CommitRolledBackError,
    EngineUnavailableError,
    IncompleteError,
    TargetBusyError,
)
from weightsync.core.trace import Trace  # noqa: E402
from weightsync.core.types import Limits, Scope, SessionState, Target  # noqa: E402
from weightsync.engines.modules import ModuleEngine  # noqa: E402
from weightsync.server.serve import serve  # noqa: E402
from weightsync.server.server import Server  # noqa: E402

SOURCE = tiny(9)


class Site:
    """Three workers; each can be made to fail at a step, and each is behind a proxy."""

    def __init__(self) -> None:
        self.models: list[Tiny] = [tiny(i) for i in range(3)]
        self.failing: dict[int, str] = {}
        self.servers: list[Server] = []
        for index, model in enumerate(self.models):
            self.servers.append(serve(model, trace=Trace(self._hook(index))))
        self.proxies = [Proxy(server.address) for server in self.servers]
        self.fleet = Fleet([proxy.address for proxy in self.proxies])

    def _hook(self, index: int):  # type: ignore[no-untyped-def]  # noqa: ANN202 - core.trace.Hook
        def hook(name: str, _facts: dict[str, object]) -> None:
            if self.failing.get(index) == name:
                raise RuntimeError(f"failure at {name}")

        return hook

    def close(self) -> None:
        """Stop everything."""
        for proxy in self.proxies:
            proxy.close()
        for server in self.servers:
            server.stop(grace=0)
        self.fleet.close()


@pytest.fixture
def site() -> Iterator[Site]:
    """Serve three workers."""
    made = Site()
    yield made
    made.close()


def test_all_workers_get_the_same_version(site: Site) -> None:
    """One push makes the same bits live everywhere, put together once."""
    report = push_model(site.fleet, SOURCE, version="v1")
    assert all(bits(model) == bits(SOURCE) for model in site.models)
    assert report.sent_bytes == sum(map(len, bits(SOURCE).values()))
    assert [w.outcome for w in report.workers] == [Outcome.COMMITTED] * 3
    assert verify(site.fleet, SOURCE).equal


def test_a_refused_start_leaves_no_session_behind(site: Site) -> None:
    """B57: one busy worker is enough for the fleet to stay as it is, all others free."""
    with Fleet([site.servers[1].address]) as other:
        held = other.update(version="other", holder="trainer B")
        with pytest.raises(TargetBusyError, match="trainer B"):
            site.fleet.update(version="v1")
        held.abort()
    push_model(site.fleet, SOURCE, version="v2")


def test_a_failed_prepare_aborts_all(site: Site) -> None:
    """B63: what one worker misses, none commits; all keep the old version, bit for bit."""
    before = [bits(model) for model in site.models]
    state = SOURCE.state_dict()
    session = site.fleet.update(version="v1")
    session.push({k: v for k, v in state.items() if k != "fc.weight"})
    with pytest.raises(IncompleteError, match=r"fc\.weight"):
        session.finish()
    assert [bits(model) for model in site.models] == before
    assert all(w.info().targets[0].session_id == "" for w in site.fleet.workers)


def test_a_failed_finish_says_who_holds_what(site: Site) -> None:
    """B63: after a commit that one worker rolled back the report tells each one's version."""
    push_model(site.fleet, SOURCE, version="v1")
    site.failing[1] = "commit.parameter"
    with pytest.raises(FleetError) as raised:
        push_model(site.fleet, tiny(10), version="v2")
    workers = raised.value.report.workers
    held = [worker.weight_versions[Target.VERIFIER] for worker in workers]
    assert held == ["v2", "v1", "v2"]
    assert [w.outcome is Outcome.COMMITTED for w in workers] == [True, False, True]
    assert isinstance(workers[1].error, CommitRolledBackError)
    assert bits(site.models[1]) == bits(SOURCE)
    site.failing.clear()
    push_model(site.fleet, tiny(10), version="v2")
    assert all(bits(model) == bits(tiny(10)) for model in site.models)


def test_an_engine_may_commit_the_sessions_itself(site: Site) -> None:
    """What an engine has committed between the phases is reported as any commit."""
    with site.fleet.update(version="v1") as session:
        session.push(SOURCE)
        workers = site.fleet.workers

        def commit(session_ids: Sequence[str]) -> None:
            for worker, session_id in zip(workers, session_ids, strict=True):
                worker.finish(session_id)

        report = session.finish(commit)
    assert report.committed
    assert verify(site.fleet, SOURCE).equal


def test_an_engine_that_can_not_commit_leaves_no_session(site: Site) -> None:
    """What the engine raised is raised, and all workers are free again."""

    def commit(_session_ids: Sequence[str]) -> None:
        raise RuntimeError("the engine has died")

    session = site.fleet.update(version="v1")
    session.push(SOURCE)
    with pytest.raises(RuntimeError, match="has died"):
        session.finish(commit)
    assert all(not w.info().targets[0].session_id for w in site.fleet.workers)


def test_a_commit_that_nobody_made_leaves_no_session() -> None:
    """An engine that reaches no step boundary fails the push, and its worker is free again."""
    engine = ModuleEngine(tiny(0))
    with (
        serve(engine=engine, limits=Limits(gate_timeout=0.05)) as server,
        Fleet([server.address]) as fleet,
    ):
        with (
            engine.gate.step(Target.VERIFIER),
            pytest.raises(EngineUnavailableError),
        ):
            push_model(fleet, SOURCE, version="v1", options=SendOptions(patience=0.1))
        assert not fleet.workers[0].info().targets[0].session_id
        push_model(fleet, SOURCE, version="v2")


def test_a_worker_lost_between_the_phases_is_repaired_by_finishing_again(site: Site) -> None:
    """B63: its state is told as not known; a second finish asks it again and leaves the others."""
    session = site.fleet.update(version="v1", options=SendOptions(patience=0.3))
    session.push(SOURCE)

    def lose(name: str, _facts: dict[str, object]) -> None:
        if name == "commit.started":
            site.proxies[2].pause()

    site.servers[2].worker.trace.add(lose)
    with pytest.raises(FleetError) as raised:
        session.finish()
    outcomes = [worker.outcome for worker in raised.value.report.workers]
    assert outcomes == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.UNKNOWN]
    site.proxies[2].resume()
    report = session.finish()
    assert report.committed
    assert all(bits(model) == bits(SOURCE) for model in site.models)
    assert session.finish() is report
    assert [w.info().targets[0].num_commits for w in site.fleet.workers] == [1, 1, 1]


def test_a_cut_connection_to_one_worker_is_resumed(site: Site) -> None:
    """One lost connection of many does not fail the update."""
    options = SendOptions(chunk_bytes=16)
    with site.fleet.update(version="v1", options=options) as session:
        for tensor in SOURCE.state_dict().items():
            session.push([tensor])
            site.proxies[1].cut()
    assert all(bits(model) == bits(SOURCE) for model in site.models)


def test_workers_must_hold_the_expected_version(site: Site) -> None:
    """An update on top of a version that one worker lacks is refused by all."""
    push_model([site.servers[0].address], SOURCE, version="v1")
    with pytest.raises(BaseVersionMismatchError):
        site.fleet.update(
            version="v2", scope=Scope.PARTIAL, expected_base_versions={Target.VERIFIER: "v1"}
        )
    assert site.fleet.workers[0].info().targets[0].session_id == ""


def test_pipeline_stages_get_their_own_layers() -> None:
    """Workers with different tensors form one fleet: each gets what it has, and only that."""
    stages = [nn.ModuleDict({"a": nn.Linear(4, 4)}), nn.ModuleDict({"b": nn.Linear(4, 4)})]
    source = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    with serve(stages[0]) as first, serve(stages[1]) as second:
        report = push_model([first.address, second.address], source, version="v1")
    assert bits(stages[0]) | bits(stages[1]) == bits(source)
    assert report.sent_bytes == sum(map(len, bits(source).values()))
    applied = [w.commit.applied_bytes for w in report.workers if w.commit is not None]
    assert applied == [80, 80]


def test_the_state_of_a_session_is_told_by_its_repr(site: Site) -> None:
    """A person sees version, number of workers and state."""
    session = site.fleet.update(version="v1")
    assert repr(session) == "Session('v1', 3 workers, open)"
    (first, *_) = session.ticket.session_ids
    assert site.fleet.workers[0].session(first).state is SessionState.OPEN
    session.abort()
    assert "aborted" in repr(session)
