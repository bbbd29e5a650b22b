from __future__ import annotations

import importlib.util
import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from tests.cli.conftest import run
from weightsync.cli.demo.events import Event, Listening, Observed, Pushed, Saved, Trained, Verified
from weightsync.cli.demo.lesson import Lesson
from weightsync.cli.demo.models import BORROWED, llama
from weightsync.cli.demo.text import capitals, corpus, readable
from weightsync.cli.demo.vllm.eagle import Eagle
from weightsync.cli.demo.vllm.plan import StoryPlan
from weightsync.cli.demo.vllm.story import Story
from weightsync.cli.demo.vllm.view import Lines, Screen
from weightsync.core.types import Target

V, D = Target.VERIFIER, Target.DRAFT
TINY = StoryPlan(hidden=32, verifier_layers=1, batch_size=2)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_remedy_is_told() -> None:
    """Where vLLM is missing the command says so, names what to install, and exits with 4."""
    done = run("demo-vllm")
    assert done.returncode == 4
    assert "pip install vllm" in done.stderr
    assert "make demo-vllm" in done.stderr


def pushed(version: str, verifier: str, draft: str) -> Pushed:
    """Return a push of 2 MB after which the models hold these versions."""
    return Pushed(0.0, version, 2_000_000, 49, 0.1, 0.002, {V: verifier, D: draft})


def observed(accepted: int, tokens: tuple[int, ...] = (1, 2)) -> Observed:
    """Return that of 10 proposals of 2 tokens so many were accepted."""
    return Observed(0.0, (tokens,), "It goes", " on", 10, 20, (accepted, 0), 16)


@pytest.fixture
def events() -> list[Event]:
    """A run as it should be."""
    return [
        Trained(0.0, 10, 2.0, 0.3),
        Saved("folder", "step-10"),
        Listening("directory", ""),
        observed(8),
        pushed("step-20", "step-20", ""),
        observed(1, (3, 4)),
        pushed("step-30", "step-20", "step-30"),
        observed(7, (3, 4)),
        pushed("step-40", "step-40", "step-40"),
        observed(6, (5, 6)),
        Verified(58, ()),
        Saved("folder", "step-40"),
        observed(6, (5, 6)),
    ]


def told(events: list[Event]) -> Story:
    """Return a story of some events."""
    story = Story()
    for event in events:
        story.add(event)
    return story


def test_a_story_that_holds(events: list[Event]) -> None:
    """Each claim holds for such a run, and each scene tells what both models held."""
    story = told(events)
    assert [claim.text for claim in story.claims() if not claim.holds] == []
    held = [(scene.version(V), scene.version(D)) for scene in story.scenes]
    assert held == [
        ("step-10", "step-10"),
        ("step-20", "step-10"),
        ("step-20", "step-30"),
        ("step-40", "step-40"),
        ("step-40", "step-40"),
    ]
    assert story.scenes[0].tokens_per_step == 1.8


@pytest.mark.parametrize(
    ("index", "instead", "claim"),
    [
        (5, observed(6, (3, 4)), "the verifier alone"),
        (4, pushed("step-20", "step-20", "step-20"), "the verifier alone"),
        (7, observed(2, (3, 4)), "the draft alone"),
        (7, observed(7, (3, 5)), "the draft changed the speed"),
        (8, pushed("step-40", "step-40", "step-30"), "both were pushed"),
        (9, observed(2, (5, 6)), "both were pushed"),
        (10, Verified(58, ("verifier:lm_head.weight",)), "bit for bit"),
        (10, Verified(0, ()), "bit for bit"),
        (12, observed(6, (5, 7)), "a fresh vLLM"),
        (12, observed(5, (5, 6)), "a fresh vLLM"),
    ],
)
def test_what_does_not_hold_is_told(
    events: list[Event], index: int, instead: Event, claim: str
) -> None:
    """One thing that goes otherwise breaks the claim that is about it."""
    events[index] = instead
    broken = [claim.text for claim in told(events).claims() if not claim.holds]
    assert any(claim in text for text in broken)


def test_the_screen_shows_every_scene(events: list[Event]) -> None:
    """The screen has a line for each scene, with versions, acceptance, pause, bytes and text."""
    file = io.StringIO()
    story = told(events)
    with Screen(story, Console(file=file, force_terminal=True, width=140, height=40)) as screen:
        screen.show(events[0])
    for expected in ("vLLM starts", "verifier + draft", "step-30", "40%", "1.80", "2.0 ms", "2 MB"):
        assert expected in file.getvalue()
    assert "training: step 10" in file.getvalue()


def test_lines_tell_every_scene(events: list[Event], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal there is a line for each start of vLLM and for each scene."""
    story = Story()
    with Lines(story) as lines:
        for event in events:
            story.add(event)
            lines.show(event)
    said = capsys.readouterr().err.splitlines()
    assert sum("accepted" in line for line in said) == len(story.scenes)
    assert sum(line.startswith("starting vLLM") for line in said) == 2


def test_capitals_are_asked_for_after_any_beginning() -> None:
    """What is read goes over to capitals at some place; what is to be said is in capitals."""
    tokens = corpus()[None, :64].long().repeat(4, 1)
    read, answers = capitals(tokens, torch.Generator().manual_seed(0))
    upper = readable(tokens[0].tolist()).upper()
    for row, wanted in zip(read, answers, strict=True):
        assert readable(row.tolist()).upper() == upper
        assert readable(wanted.tolist()) == upper[1:]
    assert len({tuple(row.tolist()) for row in read}) > 1


@pytest.mark.parametrize("target", [V, D])
def test_one_model_learns_and_the_other_stays(target: Target) -> None:
    """A lesson for one model changes no bit of the other; a draft does not own what it borrows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    verifier = llama(TINY.hidden, TINY.verifier_layers)
    draft = Eagle(verifier)
    assert not any(name in draft.tensors() for name in BORROWED)

    def held() -> dict[Target, list[bytes]]:
        tensors = {V: verifier.state_dict().values(), D: draft.tensors().values()}
        return {t: [x.numpy().tobytes() for x in values] for t, values in tensors.items()}

    before = held()
    Lesson(verifier, draft, replace(TINY, seed=1)).step((target,), capitals)
    after = held()
    assert {t for t in Target if before[t] != after[t]} == {target}
