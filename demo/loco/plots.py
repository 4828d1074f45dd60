"""The plots of a run with several trainers."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from demo.loco.summary import Row, Summary
from demo.plots import BLUE, GREEN, ORANGE, RED, svg


def plots(summary: Summary) -> list[tuple[str, str]]:
    """(title, SVG) of every plot."""
    drawn: list[tuple[str, Callable[[Axes, list[Row]], None]]] = [
        ("What each trainer learned on its own sums", _reward),
        ("Bytes per trainer and round (logarithmic)", _bytes),
        ("Shares of the parameters", _shares),
        ("Bytes per entry of a payload", _per_entry),
        ("Seconds of a round, slowest trainer", _seconds),
        ("What waits in error feedback, L2 norm", _norm),
        ("For how many rounds it has waited, on average", _age),
        ("Workers that hold the version, bit for bit", _verified),
    ]
    return [(title, svg(draw, summary.rows, "round")) for title, draw in drawn]


def _numbers(rows: list[Row]) -> list[int]:
    return [row.round for row in rows]


def _reward(axes: Axes, rows: list[Row]) -> None:
    for rank in range(max((len(row.rewards) for row in rows), default=0)):
        points = [(row.round, row.rewards[rank]) for row in rows if rank < len(row.rewards) and row.rewards[rank] is not None]
        axes.plot(
            [number for number, _ in points], [float(value or 0) for _, value in points], label=f"trainer {rank}", marker="o", markersize=3
        )
    axes.set_ylim(0, 1)


def _bytes(axes: Axes, rows: list[Row]) -> None:
    lines: list[tuple[str, str, Callable[[Row], float]]] = [
        ("DDP, FP32 gradients", RED, lambda row: row.payload * row.under_ddp(4)),
        ("dense FP32", ORANGE, lambda row: row.payload * row.under_dense),
        ("payload", BLUE, lambda row: row.payload),
        ("patch to the workers", GREEN, lambda row: row.patch_bytes),
    ]
    for label, colour, value in lines:
        axes.plot(_numbers(rows), [value(row) for row in rows], color=colour, label=label, marker="o", markersize=3)
    axes.set_yscale("log")


def _shares(axes: Axes, rows: list[Row]) -> None:
    lines: list[tuple[str, str, Callable[[Row], float]]] = [
        ("sent by a trainer", BLUE, lambda row: row.share_sent),
        ("sent by any", ORANGE, lambda row: row.union / row.elements),
        ("changed in the view", GREEN, lambda row: row.view_changed / row.elements),
    ]
    for label, colour, value in lines:
        axes.plot(_numbers(rows), [100 * value(row) for row in rows], color=colour, label=label, marker="o", markersize=3)
    axes.set_ylabel("%")
    axes.set_ylim(bottom=0)


def _per_entry(axes: Axes, rows: list[Row]) -> None:
    axes.plot(_numbers(rows), [sum(row.payload_bytes) / max(sum(row.sent), 1) for row in rows], color=BLUE, marker="o", markersize=3)
    axes.set_ylim(bottom=0)


def _seconds(axes: Axes, rows: list[Row]) -> None:
    low = [0.0] * len(rows)
    for phase, colour in (("encode", BLUE), ("exchange", ORANGE), ("decode", "#8e63b5"), ("commit", GREEN), ("publish", RED)):
        heights = [row.seconds[phase] for row in rows]
        axes.bar(_numbers(rows), heights, bottom=low, color=colour, label=phase)
        low = [a + b for a, b in zip(low, heights, strict=True)]


def _norm(axes: Axes, rows: list[Row]) -> None:
    axes.plot(_numbers(rows), [max(row.feedback_norms) for row in rows], color=BLUE, marker="o", markersize=3)
    axes.set_ylim(bottom=0)


def _age(axes: Axes, rows: list[Row]) -> None:
    axes.plot(_numbers(rows), [max(row.ages) for row in rows], color=BLUE, marker="o", markersize=3)
    axes.set_ylim(bottom=0)


def _verified(axes: Axes, rows: list[Row]) -> None:
    different = [row.holders - row.agreeing for row in rows]
    axes.bar(_numbers(rows), [row.agreeing for row in rows], color=GREEN, label="equal")
    axes.bar(_numbers(rows), different, bottom=[row.agreeing for row in rows], color=RED, label="different")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
