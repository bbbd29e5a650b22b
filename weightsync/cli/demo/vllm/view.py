"""The story on a terminal, as it grows, and as lines where there is none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from weightsync.cli.demo.events import Event, Listening, Observed, Pushed, Saved, Trained
from weightsync.cli.demo.vllm.story import Scene, Story
from weightsync.cli.output import size
from weightsync.core.types import Target

if TYPE_CHECKING:
    from typing_extensions import Self

COLUMNS = (
    "pushed",
    "verifier",
    "draft",
    "accepted",
    "by position",
    "tokens/step",
    "stood still",
    "sent",
    "it writes",
)
_SAMPLE_CHARACTERS = 26


def row(scene: Scene) -> list[str]:
    """Return a scene as the cells of a table."""
    pushed = scene.pushed
    return [
        " + ".join(str(target) for target in Target if target in scene.targets) or "vLLM starts",
        scene.version(Target.VERIFIER),
        scene.version(Target.DRAFT),
        f"{scene.observed.acceptance:.0%}",
        " ".join(f"{share:.0%}" for share in scene.by_position),
        f"{scene.tokens_per_step:.2f}",
        f"{pushed.pause_seconds * 1000:.1f} ms" if pushed else "",
        size(pushed.num_bytes) if pushed else "",
        " ".join(scene.observed.sample.split())[:_SAMPLE_CHARACTERS],
    ]


class Screen:
    """Draws the scenes so far, and what is going on, on standard error."""

    def __init__(self, story: Story, console: Console) -> None:
        """Show a story that grows."""
        self._story = story
        self._doing = Spinner("dots", "starting a trainer and vLLM ...")
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Clear what was drawn; the result follows."""
        self._live.stop()

    def show(self, event: Event) -> None:
        """Say what is going on since an event."""
        if (text := _doing(event)) is not None:
            self._doing.update(text=text)

    def _render(self) -> RenderableType:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, no_wrap=True)
        for scene in self._story.scenes:
            table.add_row(*map(escape, row(scene)))
        return Group(table, self._doing) if self._story.scenes else self._doing


class Lines:
    """Writes a line for each scene to standard error."""

    def __init__(self, story: Story) -> None:
        """Show a story that grows."""
        self._story = story

    def __enter__(self) -> Self:
        """Return itself; nothing is to be prepared."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave all as it is."""

    def show(self, event: Event) -> None:
        """Write what was observed, and what takes long."""
        if isinstance(event, Observed):
            named = zip(COLUMNS, row(self._story.scenes[-1]), strict=True)
            _write("  ".join(f"{name} {value}" for name, value in named if value))
        elif not isinstance(event, Trained | Pushed) and (text := _doing(event)) is not None:
            _write(text)


def _doing(event: Event) -> str | None:
    match event:
        case Trained():
            return (
                f"training: step {event.step}, the verifier's loss {event.loss:.2f}, "
                f"the draft's {event.draft_loss:.2f} nats per byte"
            )
        case Saved():
            return f"starting vLLM on the checkpoints of {event.version} ..."
        case Listening():
            return "vLLM generates, with the draft's help"
        case Pushed():
            return f"{event.version} is live; reading vLLM's metrics ..."
        case _:
            return None


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
