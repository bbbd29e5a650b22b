"""Workers that lack what others hold: repaired from a trainer, or caught up from a peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from weightsync_client import (  # noqa: E402
    Fleet,
    FleetError,
    Outcome,
    Worker,
    catch_up,
    push_model,
    repair,
    verify,
)

from tests.client.live import bits  # noqa: E402
from weightsync.core.errors import (  # noqa: E402
    InvalidRequestError,
    QuarantinedError,
    SharedWeightError,
    TargetBusyError,
    VersionChangedError,
)
from weightsync.core.types import Limits, SharedTensorPolicy, Target, UpdateMode  # noqa: E402
from weightsync.server.serve import serve  # noqa: E402
from weightsync.server.server import Server  # noqa: E402
from weightsync.testing.failpoints import Failpoint, raise_error  # noqa: E402
from weightsync.testing.models import Tiny, tiny_pair  # noqa: E402
from weightsync.wire.chunk import Chunk  # noqa: E402

Pair = tuple[Tiny, Tiny]
NEW: Pair = tiny_pair(dtype=torch.bfloat16, seed=7)
NEWER: Pair = tiny_pair(dtype=torch.bfloat16, seed=8)


class Site:
    """Three workers that each serve a pair."""

    def __init__(self) -> None:
        self.pairs = [tiny_pair(dtype=torch.bfloat16, seed=i) for i in range(3)]
        self.servers: list[Server] = [serve(*pair) for pair in self.pairs]
        self.addresses = [server.address for server in self.servers]

    def holds(self, index: int, pair: Pair) -> bool:
        """Tell whether a worker holds a pair, bit for bit."""
        return [bits(model) for model in self.pairs[index]] == [bits(model) for model in pair]

    def versions(self, index: int) -> list[str]:
        """Return what a worker says that it holds."""
        return [t.weight_version for t in self.servers[index].worker.info().targets]


@pytest.fixture
def site() -> Iterator[Site]:
    """Serve three pairs."""
    made = Site()
    yield made
    for server in made.servers:
        server.stop(grace=0)


def outcomes(report: object) -> Sequence[Outcome]:
    """Return what each worker made of it."""
    return [worker.outcome for worker in report.workers]  # type: ignore[attr-defined]


# -- from a trainer --------------------------------------------------------------------------------


def test_repair_pushes_to_those_that_lack_the_version(site: Site) -> None:
    """B63: after a mixed commit one call brings the rest to the version; the others stay alone."""
    failpoint = Failpoint("commit.parameter", raise_error)
    remove = site.servers[1].worker.trace.add(failpoint.hook)
    with Fleet(site.addresses) as fleet:
        with pytest.raises(FleetError, match="repair"):
            push_model(fleet, *NEW, version="v1")
        remove()
        report = repair(fleet, *NEW, version="v1")
        assert outcomes(report) == [Outcome.HELD, Outcome.COMMITTED, Outcome.HELD]
        assert report.committed
        assert all(site.holds(index, NEW) for index in range(3))
        commits = [w.info().targets[0].num_commits for w in fleet.workers]
        assert commits == [1, 1, 1]
        again = repair(fleet, *NEW, version="v1")
    assert outcomes(again) == [Outcome.HELD] * 3
    assert again.sent_bytes == 0


def test_a_repair_that_fails_again_tells_of_all(site: Site) -> None:
    """The report of a repair names those that were left alone as well."""
    push_model(site.addresses[0], *NEW, version="v1")
    failpoint = Failpoint("commit.parameter", raise_error)
    site.servers[2].worker.trace.add(failpoint.hook)
    with pytest.raises(FleetError) as raised:
        repair(site.addresses, *NEW, version="v1")
    expected = [Outcome.HELD, Outcome.COMMITTED, Outcome.NOT_COMMITTED]
    assert outcomes(raised.value.report) == expected
    assert "2 of 3 workers" in str(raised.value)


def test_a_target_of_another_version_is_repaired(site: Site) -> None:
    """A worker that holds the version of one model only lacks it."""
    push_model(site.addresses[0], *NEW, version="v1")
    push_model(site.addresses[1], NEW[0], version="v1")
    report = repair(site.addresses[:2], *NEW, version="v1")
    assert outcomes(report) == [Outcome.HELD, Outcome.COMMITTED]


def test_a_worker_that_comes_late_is_added(site: Site) -> None:
    """Later updates of the fleet reach a worker that was added; it is not added twice."""
    with Fleet(site.addresses[:2]) as fleet:
        push_model(fleet, *NEW, version="v1")
        late = fleet.add(site.addresses[2])
        with pytest.raises(InvalidRequestError, match="already"):
            fleet.add(site.addresses[2])
        report = repair(fleet, *NEW, version="v1")
        assert outcomes(report) == [Outcome.HELD, Outcome.HELD, Outcome.COMMITTED]
        push_model(fleet, *NEWER, version="v2")
        assert late.info().targets[0].weight_version == "v2"
    assert all(site.holds(index, NEWER) for index in range(3))


# -- from a peer -----------------------------------------------------------------------------------


def test_a_late_worker_catches_up_from_a_peer(site: Site) -> None:
    """It holds the peer's weights and version, bit for bit, though no trainer is there."""
    push_model(site.addresses[0], *NEW, version="v1")
    report = catch_up(site.addresses[1], site.addresses[0])
    assert report.outcome is Outcome.COMMITTED
    assert set(report.weight_versions.values()) == {"v1"}
    assert site.holds(1, NEW)
    assert verify(site.addresses[1], NEW[0]).equal
    # What is there already is not copied again.
    assert catch_up(site.addresses[1], site.addresses[0]).outcome is Outcome.HELD
    assert site.servers[1].worker.info().targets[0].num_commits == 1


def test_targets_of_two_versions_are_caught_up(site: Site) -> None:
    """A draft whose version is not the verifier's keeps its own version and weights."""
    push_model(site.addresses[0], *NEW, version="v1")
    push_model(site.addresses[0], None, own_part(NEWER[1]), version="d2")
    catch_up(site.addresses[1], site.addresses[0])
    assert site.versions(1) == ["v1", "d2"]
    assert [bits(model) for model in site.pairs[1]] == [bits(model) for model in site.pairs[0]]
    verifier, draft = site.pairs[1]
    assert draft.embed.weight.data_ptr() == verifier.embed.weight.data_ptr()


def own_part(draft: Tiny) -> dict[str, Tensor]:
    """Return what a draft does not share with its verifier."""
    shared = ("embed.weight", "head.weight")
    return {name: t for name, t in draft.state_dict().items() if name not in shared}


def test_a_peer_that_has_cut_its_tie_is_told(site: Site) -> None:
    """A worker that keeps equal weights once can't hold different ones, unless it is cut too."""
    push_model(site.addresses[0], *NEW, version="v1")
    cut = SharedTensorPolicy.UNSHARE
    push_model(site.addresses[0], None, NEWER[1], version="d2", shared_tensors=cut)
    with pytest.raises(SharedWeightError):
        catch_up(site.addresses[1], site.addresses[0])
    catch_up(site.addresses[1], site.addresses[0], shared_tensors=cut)
    assert [bits(model) for model in site.pairs[1]] == [bits(model) for model in site.pairs[0]]


class Overtaken(Worker):
    """A connection on whose every read a trainer comes in between, some times."""

    def __init__(self, address: str, commit: Callable[[], object], times: int) -> None:
        super().__init__(address)
        self._commit = commit
        self._times = times

    def read(self, target: Target, names: Sequence[str] = ()) -> Iterator[Chunk]:
        """Yield what is there by then."""
        if self._times:
            self._times -= 1
            self._commit()
        yield from super().read(target, names)


def test_a_peer_that_changes_is_read_again(site: Site) -> None:
    """A commit on the peer comes in between: the late worker gets the newer version whole."""
    push_model(site.addresses[0], *NEW, version="v1")

    def commit() -> None:
        push_model(site.addresses[0], *NEWER, version="v2")

    with Overtaken(site.addresses[0], commit, 1) as peer:
        catch_up(site.addresses[1], peer)
    assert site.versions(1) == ["v2", "v2"]
    assert site.holds(1, NEWER)


def test_a_peer_that_never_rests_is_given_up(site: Site) -> None:
    """The late worker keeps what it holds, and is free."""
    push_model(site.addresses[0], *NEW, version="v0")
    before = [bits(model) for model in site.pairs[1]]
    numbers = itertools.count(1)

    def commit() -> None:
        push_model(site.addresses[0], *NEWER, version=f"v{next(numbers)}")

    with Overtaken(site.addresses[0], commit, 100) as peer, pytest.raises(VersionChangedError):
        catch_up(site.addresses[1], peer)
    assert [bits(model) for model in site.pairs[1]] == before
    assert not site.servers[1].worker.info().targets[0].session_id


def test_large_tensors_are_caught_up_in_pieces(site: Site) -> None:
    """A peer whose messages hold few elements each is read no less exactly."""
    limits = Limits(max_message_bytes=(64 << 10) + 33)
    with serve(*tiny_pair(dtype=torch.bfloat16), limits=limits) as peer:
        push_model(peer.address, *NEW, version="v1")
        catch_up(site.addresses[1], peer.address)
    assert site.holds(1, NEW)


def test_nothing_is_taken_from_a_peer_without_a_version(site: Site) -> None:
    """A peer that was restarted itself has nothing to give."""
    with pytest.raises(InvalidRequestError, match="holds no version"):
        catch_up(site.addresses[1], site.addresses[0])


def test_nothing_is_taken_from_a_quarantined_peer(site: Site) -> None:
    """A peer whose weights may be torn is no source."""
    push_model(site.addresses[0], *NEW, version="v1")
    with Fleet([site.addresses[0]]) as fleet:
        session = fleet.update(version="v2", target=("verifier", "draft"), mode=UpdateMode.IN_PLACE)
        session.push({"fc.weight": NEWER[0].fc.weight}, target=Target.VERIFIER)
        session.settle()
        session.abort()
    with pytest.raises(QuarantinedError, match="another peer"):
        catch_up(site.addresses[1], site.addresses[0])


def test_a_trainer_at_work_is_not_disturbed(site: Site) -> None:
    """A worker that is being updated is not caught up, and who asks is told who is there."""
    push_model(site.addresses[0], *NEW, version="v1")
    with Fleet([site.addresses[1]]) as fleet:
        session = fleet.update(version="v2", holder="the trainer")
        with pytest.raises(TargetBusyError, match="the trainer"):
            catch_up(site.addresses[1], site.addresses[0])
        session.push(NEWER[0])
        assert session.finish().committed
