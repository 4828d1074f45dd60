"""The report's plots, as SVG that takes its text colour from the page."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from demo.summary import Row, Summary

Point = TypeVar("Point")

_INK = "#010203"  # replaced by the page's own colour
BLUE, ORANGE, GREEN, RED = "#3d85c6", "#d9822b", "#2e9e5b", "#cc4b4b"


def plots(summary: Summary) -> list[tuple[str, str]]:
    """(title, SVG) of every plot."""
    rows = summary.rows
    drawn: list[tuple[str, Callable[[Axes, list[Row]], None]]] = [
        ("What it learned", _reward),
        ("What travelled, in bytes (logarithmic)", _bytes),
        ("Share of the BF16 weights that changed", _changed),
        ("Bytes per changed weight", _per_change),
        ("Seconds from the optimizer step to the first token", _seconds),
        ("Seconds of publish, fetch and apply", _parts),
        ("Staleness of the rollouts learned from, in versions", _staleness),
        ("Workers that hold the version, bit for bit", _verified),
    ]
    return [(title, svg(draw, rows, "optimizer step")) for title, draw in drawn]


def svg(draw: Callable[[Axes, list[Point]], None], rows: list[Point], x: str) -> str:
    """What `draw` makes of `rows`, over an axis named `x`."""
    style: dict[Any, Any] = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    style |= {"svg.fonttype": "none", "svg.hashsalt": "pulse", "font.family": "sans-serif", "font.size": 10}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.2, color=_INK)
        axes.set_xlabel(x)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        draw(axes, rows)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(frameon=False, fontsize=9, loc="outside upper center", ncols=3)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    page = text.getvalue()
    return page[page.index("<svg") :].replace(_INK, "currentColor")


def _line(axes: Axes, rows: list[Row], value: Callable[[Row], float | None], **style: Any) -> None:
    points = [(row.step, found) for row in rows if (found := value(row)) is not None]
    axes.plot([step for step, _ in points], [found for _, found in points], **style)


def _reward(axes: Axes, rows: list[Row]) -> None:
    _line(axes, rows, lambda row: row.reward, color=BLUE, marker="o", markersize=3, linewidth=0.8, label="reward in training")
    axes.plot([row.step for row in rows if row.reward is not None], _smooth(rows), color=BLUE, linewidth=2.5, label="mean of five steps")
    _line(axes, rows, lambda row: row.held_out, color=ORANGE, marker="D", linestyle="none", label="held-out accuracy")
    axes.set_ylim(0, 1)


def _smooth(rows: list[Row]) -> list[float]:
    """The mean of the up to five rewards around each."""
    rewards = [row.reward for row in rows if row.reward is not None]
    around = [rewards[max(0, index - 2) : index + 3] for index in range(len(rewards))]
    return [sum(near) / len(near) for near in around]


def _bytes(axes: Axes, rows: list[Row]) -> None:
    full = [row.nbytes * row.ratio for row in rows]
    axes.plot([row.step for row in rows], full, color=RED, linestyle="--", label="the whole BF16 model")
    for kind, colour in (("anchor", ORANGE), ("patch", BLUE), ("checkpoint", RED)):
        chosen = [row for row in rows if row.kind == kind]
        if chosen:
            axes.bar(
                [row.step for row in chosen],
                [row.nbytes for row in chosen],
                color=colour,
                label=f"{kind}es" if kind == "patch" else f"{kind}s",
            )
    axes.set_yscale("log")


def _changed(axes: Axes, rows: list[Row]) -> None:
    _line(axes, [row for row in rows if row.kind == "patch"], lambda row: 100 * row.changed_share, color=BLUE, marker="o", markersize=3)
    axes.set_ylabel("%")
    axes.set_ylim(bottom=0)


def _per_change(axes: Axes, rows: list[Row]) -> None:
    _line(axes, [row for row in rows if row.kind == "patch"], lambda row: row.bytes_per_change, color=BLUE, marker="o", markersize=3)
    axes.set_ylim(bottom=0)


def _seconds(axes: Axes, rows: list[Row]) -> None:
    _line(axes, rows[1:], lambda row: row.to_first_token, color=GREEN, marker="o", markersize=3)
    axes.set_ylim(bottom=0)


def _parts(axes: Axes, rows: list[Row]) -> None:
    later = rows[1:]
    steps = [row.step for row in later]
    low = [0.0] * len(later)
    parts: list[tuple[str, str, Callable[[Row], float]]] = [
        ("publish", BLUE, lambda row: row.publish_seconds),
        ("fetch and verify", ORANGE, lambda row: row.fetch_seconds),
        ("apply (the pause)", GREEN, lambda row: row.apply_seconds),
    ]
    for label, colour, value in parts:
        heights = [value(row) for row in later]
        axes.bar(steps, heights, bottom=low, color=colour, label=label)
        low = [a + b for a, b in zip(low, heights, strict=True)]


def _staleness(axes: Axes, rows: list[Row]) -> None:
    _line(axes, rows, lambda row: row.staleness, color=BLUE, marker="o", markersize=3)
    axes.set_ylim(-0.1, max(1, *(row.staleness or 0 for row in rows)) + 0.1)


def _verified(axes: Axes, rows: list[Row]) -> None:
    axes.bar([row.step for row in rows], [row.agreeing for row in rows], color=GREEN, label="equal")
    axes.bar(
        [row.step for row in rows],
        [row.holders - row.agreeing for row in rows],
        bottom=[row.agreeing for row in rows],
        color=RED,
        label="different",
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
