"""The report's plots, as SVG that takes its text colour from the page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.loco import figures
from bench.loco.figures import Cells, Row

_INK = "#010203"  # replaced by the page's own colour
_STYLES: dict[str, tuple[str, str]] = {
    "pulseloco": ("#2f6fde", "-"),
    "pulseloco, bf16 values": ("#2f6fde", "--"),
    "pulseloco, fp8 values": ("#2f6fde", ":"),
    "pulseloco, rest in masters": ("#12a4b5", "-"),
    "pulseloco, no feedback": ("#8e5bd0", "-"),
    "diloco": ("#d9691e", "-"),
    "diloco, 8 bits": ("#d9691e", "--"),
    "diloco, 4 bits": ("#d9691e", ":"),
    "sparseloco": ("#2b9348", "-"),
    "sparseloco, lr x 7": ("#2b9348", "--"),
    "localsgd": ("#8a8f98", "-"),
    "localsgd, lr x 7": ("#8a8f98", "--"),
    "ddp": ("#c23b4e", "-"),
    "ddp, lr x 7": ("#c23b4e", "--"),
    "ddp, lr x 7, BF16": ("#c23b4e", ":"),
}
_BF16 = "ddp, lr x 7, BF16"
_SHORT = 26  # letters of a name, of which three have room side by side
Draw = Callable[[Axes, Cells], None]


def plots(cells: Cells) -> list[tuple[str, str]]:
    """(title, SVG) of every plot; lines are means over seeds."""
    drawn: list[tuple[str, Draw]] = [
        ("Reward against tokens", _against_tokens("score")),
        ("Held-out accuracy against tokens", _against_tokens("held_out")),
        ("Reward against bytes on the wire, per rank", _against_bytes),
        ("Reward against time on a 100 Mbit/s link", _against_time),
        ("Sent, and changed in the view: share of all weights", _density),
        ("Sent but invisible after the step; visible but sent by nobody", _mismatch),
        ("Payload and patch, bytes per round", _sizes),
        ("What waits, in windows: its norm over that of one window's A - L", _waiting),
        ("For how many rounds it has waited, on average", _ages),
        ("Patch of the view after an outer step, bytes", _patches),
    ]
    return [(title, svg(draw, cells)) for title, draw in drawn]


def svg(draw: Draw, cells: Cells) -> str:
    """One plot."""
    style: dict[Any, Any] = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    style |= {"svg.fonttype": "none", "svg.hashsalt": "pulse", "font.family": "sans-serif", "font.size": 10}
    with mpl.rc_context(style):
        figure = Figure(figsize=(6.4, 3.9), layout="constrained")
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.2, color=_INK)
        draw(axes, cells)
        if labels := axes.get_legend_handles_labels()[1]:
            columns = 3 if max(map(len, labels)) <= _SHORT else 2
            figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=columns)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    found = text.getvalue()
    return found[found.index("<svg") :].replace(_INK, "currentColor")


def _line(axes: Axes, name: str, x: Sequence[float], y: Sequence[float]) -> None:
    colour, dashes = _STYLES[name]
    axes.plot(x, y, color=colour, linestyle=dashes, linewidth=1.5, label=name)


def _scores(rows: Sequence[Row], score: str = "score") -> list[float]:
    """With the starting model's."""
    return [mean(cell["before"][score] for cell in rows), *figures.series(rows, lambda row: float(row[score]))]


def _against_tokens(score: str) -> Draw:
    def draw(axes: Axes, cells: Cells) -> None:
        for name, rows in cells.items():
            _line(axes, name, [0.0, *figures.series(rows, lambda row: float(row["tokens"]))], _scores(rows, score))
        axes.set_xlabel("answer tokens, all ranks")
        axes.set_ylabel("P(right)")

    return draw


def _against(axes: Axes, cells: Cells, cost: Callable[[Sequence[Row], float], float]) -> None:
    """Rewards against rounds times what a round costs; DDP with BF16 gradients is the same run with half the bytes."""
    for name, rows in cells.items():
        for shown, share in ((name, 1.0), *([(_BF16, 0.5)] if name == "ddp, lr x 7" else [])):
            step = cost(rows, share)
            scores = _scores(rows)[1:]
            _line(axes, shown, [step * number for number in range(1, len(scores) + 1)], scores)
    axes.set_xscale("log")
    axes.set_ylabel("P(right)")


def _against_bytes(axes: Axes, cells: Cells) -> None:
    _against(axes, cells, lambda rows, share: share * mean(figures.series(rows, lambda row: float(row["wire_bytes"]))))
    axes.set_xlabel("bytes received by a rank, from the start")


def _against_time(axes: Axes, cells: Cells) -> None:
    _against(axes, cells, figures.round_seconds)
    axes.set_xlabel("seconds: computing, then the link")


def _by_round(axes: Axes, name: str, rows: Sequence[Row], value: Callable[[Row], float], label: str = "", dashes: str = "") -> None:
    values = figures.series(rows, value)
    colour, usual = _STYLES[name]
    axes.plot(range(1, len(values) + 1), values, color=colour, linestyle=dashes or usual, linewidth=1.5, label=label or name)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.update_datalim([(1, 0)])  # the vertical axis begins at 0
    axes.autoscale_view()


def _share(key: str, rows: Sequence[Row]) -> Callable[[Row], float]:
    """Of all weights, in percent."""
    elements = rows[0]["elements"]
    return lambda row: float(100 * row[key] / elements)


def _density(axes: Axes, cells: Cells) -> None:
    for name, rows in cells.items():
        if "union" in rows[0]["rows"][0]:
            _by_round(axes, name, rows, _share("sent", rows), f"{name}: sent")
    for name in ("pulseloco", "diloco"):
        for rows in filter(None, [cells.get(name)]):
            _by_round(axes, name, rows, _share("view_changed", rows), f"{name}: view changed", "-.")
    axes.set_ylabel("%")


def _mismatch(axes: Axes, cells: Cells) -> None:
    for name in ("pulseloco", "pulseloco, no feedback"):
        for rows in filter(None, [cells.get(name)]):
            _by_round(axes, name, rows, lambda row: 100 * figures.invisible(row), f"{name}: sent, invisible", "-")
            _by_round(axes, name, rows, lambda row: 100 * figures.unsent(row), f"{name}: visible, unsent", "--")
    axes.set_ylabel("% of the sent, % of the visible")


def _sizes(axes: Axes, cells: Cells) -> None:
    for name in ("pulseloco", "pulseloco, bf16 values", "pulseloco, fp8 values"):
        for rows in filter(None, [cells.get(name)]):
            _by_round(axes, name, rows, lambda row: float(row["payload_bytes"]), f"{name}: payload")
    for rows in filter(None, [cells.get("pulseloco")]):
        _by_round(axes, "pulseloco, rest in masters", rows, lambda row: float(row["patch_bytes"]), "pulseloco: patch of the view")


def _patches(axes: Axes, cells: Cells) -> None:
    for name, rows in cells.items():
        _by_round(axes, name, rows, lambda row: float(row["patch_bytes"]))


def _waiting(axes: Axes, cells: Cells) -> None:
    for name, rows in cells.items():
        if any(row["waiting"] for row in rows[0]["rows"]) and "masters" not in name:
            _by_round(axes, name, rows, lambda row: row["waiting"] / row["moved"])


def _ages(axes: Axes, cells: Cells) -> None:
    for name, rows in cells.items():
        if any(row["age_mean"] for row in rows[0]["rows"]):
            _by_round(axes, name, rows, lambda row: float(row["age_mean"]))
