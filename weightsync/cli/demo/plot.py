"""The run as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from weightsync.cli.demo.history import History, smooth

_WITH, _WITHOUT, _LOSS, _PAUSE = "#2a9d5c", "#d1495b", "#5b4b9a", "#30638e"


def plot(history: History, path: Path) -> None:
    """Write a PNG: loss, acceptance with and without draft updates, and pauses, over time."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    loss, acceptance, pause = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [2, 3, 1.4]}
    )
    start = history.trained[0].time
    _loss(loss, history, start)
    _acceptance(acceptance, history, start)
    _pause(pause, history, start)
    for axes in (loss, acceptance, pause):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    pause.set_xlabel("seconds of training")
    figure.suptitle("A worker generates while its verifier and draft are trained and pushed")
    figure.savefig(path, dpi=130)


def _loss(axes: Axes, history: History, start: float) -> None:
    times = [trained.time - start for trained in history.trained]
    values = [trained.loss for trained in history.trained]
    axes.plot(times, values, color=_LOSS, alpha=0.25, linewidth=1)
    axes.plot(times, smooth(values, 10), color=_LOSS, linewidth=2)
    axes.set_ylabel("verifier's loss\n(nats per byte)")


def _acceptance(axes: Axes, history: History, start: float) -> None:
    for updated, label, color in (
        (True, "draft pushed together with the verifier", _WITH),
        (False, "copy of the draft without updates", _WITHOUT),
    ):
        found = history.acceptance[updated]
        times = [time - start for time in found.times]
        axes.plot(times, [100 * r for r in found.rates], color=color, label=label, linewidth=2)
    if history.left_behind:
        moment = history.left_behind.time - start
        axes.axvline(moment, color=_WITHOUT, linestyle="--", linewidth=1)
        axes.annotate(
            f"a copy stays at {history.left_behind.version}",
            (moment, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(6, -12),
            textcoords="offset points",
            color=_WITHOUT,
        )
    axes.set_ylim(0, 100)
    axes.set_ylabel("proposed tokens accepted\nby the verifier (%)")
    axes.legend(loc="upper right", frameon=False)


def _pause(axes: Axes, history: History, start: float) -> None:
    times = [pushed.time - start for pushed in history.pushed]
    pauses = [pushed.pause_seconds * 1000 for pushed in history.pushed]
    axes.vlines(times, 0, pauses, color=_PAUSE, linewidth=1.5)
    axes.plot(times, pauses, "o", color=_PAUSE, markersize=4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("generation stood\nstill per push (ms)")
