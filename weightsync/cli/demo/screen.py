"""Progress on a terminal: numbers, bars and samples that change in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightsync.cli.demo.events import Event, Generated
from weightsync.cli.demo.history import History, rate, smooth
from weightsync.cli.demo.plain import percent

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 40
_SAMPLE_LINES = 5


class Screen:
    """Shows a history that grows, on standard error."""

    def __init__(self, history: History, console: Console) -> None:
        """Take what is shown and where."""
        self._history = history
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Clear what was drawn; the result follows."""
        self._live.stop()

    def show(self, event: Event) -> None:
        """Nothing: the screen is drawn from the history, four times a second."""

    def _render(self) -> RenderableType:
        history = self._history
        if history.listening is None:
            return Text("starting a trainer and a worker ...", style="dim")
        return Panel(
            Group(
                self._numbers(),
                Text("\nproposed tokens that the verifier accepts", style="dim"),
                self._acceptance(),
                Text(),
                self._samples(),
            ),
            title="a worker generates while a trainer pushes into it",
            subtitle=f"gRPC at {history.listening.address}",
            border_style="cyan",
        )

    def _numbers(self) -> Table:
        history = self._history
        table = Table.grid(padding=(0, 2))
        pushed = history.pushed[-1] if history.pushed else None
        worst = max((p.pause_seconds for p in history.pushed), default=0.0)
        table.add_row("version", Text(pushed.version if pushed else "not yet", style="bold green"))
        if history.trained:
            losses = smooth([trained.loss for trained in history.trained], 10)
            table.add_row("loss", Text(f"{losses[-1]:.2f}  {sparks(losses)}", style="magenta"))
        if pushed:
            table.add_row(
                "push",
                f"{pushed.num_tensors} tensors of both models, {pushed.num_bytes / 1e6:.1f} MB at "
                f"{rate(pushed):.0f} MB/s",
            )
            table.add_row(
                "stood still",
                f"{pushed.pause_seconds * 1000:.1f} ms (longest {worst * 1000:.1f} ms)",
            )
        return table

    def _acceptance(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for updated, label, style in (
            (True, "draft with updates", "green"),
            (False, "draft without", "red"),
        ):
            now = self._history.acceptance[updated].now
            bar = ProgressBar(1.0, now or 0.0, width=_SPARKS, complete_style=style)
            table.add_row(label, bar if now is not None else Text("later", style="dim"), _of(now))
        return table

    def _samples(self) -> Table:
        table = Table.grid(expand=True)
        found = [("first", self._history.first), ("now", self._history.last)]
        panels = [_sample(title, generated) for title, generated in found if generated]
        for _ in panels:
            table.add_column(ratio=1)
        table.add_row(*panels)
        return table


def sparks(values: Sequence[float]) -> str:
    """Return values as a line of small bars."""
    step = max(1, -(-len(values) // _SPARKS))
    shown = values[::-step][::-1]
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in shown)


def _sample(title: str, found: Generated) -> Panel:
    text = Text(found.prompt, style="dim")
    text.append(found.text, style="not dim")
    # Line ends of the text would leave the panel half empty.
    text = Text(" ").join(text.split())
    return Panel(text, title=f"{title}: {found.version or 'no version'}", height=_SAMPLE_LINES)


def _of(share: float | None) -> Text:
    return Text("" if share is None else percent(share), style="bold")
