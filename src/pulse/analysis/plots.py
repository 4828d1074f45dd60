"""Lines and bars as SVG, small and plain; colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 20, 42


@dataclass(frozen=True, slots=True)
class Series:
    """A named line through points."""

    name: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` or just above it to `high`, at most that many: steps of 1, 2 or 5 times a power of ten."""
    if high - low < 1e-300:  # below that, powers of ten have no floats
        return [low]
    raw = (high - low) / max(most - 1, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def lines(series: Sequence[Series], x_name: str, y_name: str, *, marks: bool = False) -> str:
    """Lines over numbers; the vertical axis starts at 0. marks: a dot at each point."""
    points = [point for one in series for point in one.points]
    if not points:
        return _frame("<text x='220' y='120' text-anchor='middle'>nothing to show</text>", x_name, y_name)
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = _top([y for _, y in points])
    span = high - low or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - low) / span * (_WIDTH - _LEFT - _RIGHT), _y(y, top)

    drawn = [_grid(top)]
    drawn += [
        f"<text x='{place(x, 0)[0]:.1f}' y='{_HEIGHT - _BOTTOM + 14}' text-anchor='middle'>{_number(x)}</text>" for x in ticks(low, high)
    ]
    for i, one in enumerate(series):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in one.points))
        drawn.append(f"<polyline class='line' style='stroke: var(--c{i % 3})' points='{path}'/>")
        if marks or len(one.points) == 1:
            dots = (place(*point) for point in one.points)
            drawn += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' style='fill: var(--c{i % 3})'/>" for x, y in dots]
    if len(series) > 1:
        drawn.append(_legend([one.name for one in series]))
    return _frame("".join(drawn), x_name, y_name)


def bars(names: Sequence[str], values: Sequence[float], y_name: str) -> str:
    """One bar for each name; where there is no room, not every name is written."""
    if not names:
        return _frame("<text x='220' y='120' text-anchor='middle'>nothing to show</text>", "", y_name)
    top = _top(values)
    room = (_WIDTH - _LEFT - _RIGHT) / len(names)
    longest = max(map(len, names))
    tilted = longest > 6
    every = math.ceil((12 if tilted else 6 * longest + 6) / room)
    drawn = [_grid(top)]
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        x = _LEFT + i * room
        box = f"x='{x + room * 0.1:.1f}' y='{_y(value, top):.1f}' width='{room * 0.8:.1f}' height='{_y(0, top) - _y(value, top):.1f}'"
        drawn.append(f"<rect {box} style='fill: var(--c0)'><title>{escape(name)}: {value:.3g}</title></rect>")
        if i % every == 0:
            middle, base = x + room / 2, _HEIGHT - _BOTTOM + 14
            turn = f"transform='rotate(-24 {middle:.1f} {base})' text-anchor='end'" if tilted else "text-anchor='middle'"
            drawn.append(f"<text x='{middle:.1f}' y='{base}' {turn}>{escape(name)}</text>")
    return _frame("".join(drawn), "", y_name)


def _top(values: Sequence[float]) -> float:
    """Where the vertical axis ends: at a round number above all values."""
    highest = max(values) or 1.0
    steps = ticks(0, highest, 5)
    step = steps[1] if len(steps) > 1 else highest
    return math.ceil(highest / step - 1e-9) * step


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)


def _grid(top: float) -> str:
    return "".join(
        f"<line class='axis' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{_y(y, top):.1f}' y2='{_y(y, top):.1f}'/>"
        f"<text x='{_LEFT - 6}' y='{_y(y, top) + 4:.1f}' text-anchor='end'>{_number(y)}</text>"
        for y in ticks(0, top, 5)
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _legend(names: Sequence[str]) -> str:
    drawn, x = [], _LEFT + 8
    for i, name in enumerate(names):
        drawn.append(f"<rect x='{x}' y='{_TOP - 14}' width='10' height='10' style='fill: var(--c{i % 3})'/>")
        drawn.append(f"<text x='{x + 14}' y='{_TOP - 5}'>{escape(name)}</text>")
        x += 24 + 7 * len(name)
    return "".join(drawn)


def _frame(content: str, x_name: str, y_name: str) -> str:
    above = f"<text x='2' y='11'>{escape(y_name)}</text>"
    below = f"<text x='{_WIDTH - _RIGHT}' y='{_HEIGHT - 5}' text-anchor='end'>{escape(x_name)}</text>"
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img'>{above}{below}{content}</svg>"
