"""A plan as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pulse.analysis.plan import RAW, OnLink, Step, borders, break_evens
from pulse.analysis.tables import Table, percent
from pulse.economics import SPEEDS, WHOLE, Speeds, rate


def lines(step: Step, workers: int = 1, speeds: Mapping[str, Speeds] = SPEEDS) -> list[str]:
    """What is assumed, and which way is the fastest on which links."""
    changes = f"{percent(step.density)} change per step ({step.changes:,.0f})"
    said = [f"{step.units:,} weights of {step.width:.3g} B; {changes}", step.how]
    marks = borders(step, workers, speeds)
    said += [f"below {rate(link)} {below} arrives before {above}" for link, below, above in marks]
    if not marks:
        said.append("one way is the fastest on every link")
    return said


def tables(step: Step, placed: Sequence[OnLink], workers: int) -> list[Table]:
    """The sizes, and every link."""
    return [_sizes(step), _links(placed, workers)]


def _sizes(step: Step) -> Table:
    whole = step.sizes[WHOLE]
    sizes = {WHOLE: whole, RAW: step.raw} | {name: size for name, size in step.sizes.items() if name != WHOLE}
    rows = [
        (
            name,
            _size(size),
            f"{size / step.changes:.3g}" if step.changes and name != WHOLE else "-",
            f"{whole / size:.3g}x" if size else "-",
        )
        for name, size in sizes.items()
    ]
    return Table("each step", ("encoding", "size", "B/change", "smaller"), tuple(rows))


def _links(placed: Sequence[OnLink], workers: int) -> Table:
    names = list(placed[0].seconds)
    ordered = [WHOLE, *(name for name in names if name != WHOLE)]
    timed = placed[0].useful is not None
    rows = [
        (
            rate(each.link),
            *(_seconds(each.seconds[name]) for name in ordered),
            each.choice.encoding,
            *((percent((each.busy or {})[each.choice.encoding]), percent(each.useful)) if timed else ()),
        )
        for each in placed
    ]
    title = "seconds until it has arrived" + (f", {workers} workers on the link" if workers > 1 else "")
    return Table(title, ("link", *ordered, "fastest", *(("link busy", "training") if timed else ())), tuple(rows))


def _size(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.3g} min" if seconds < 36_000 else f"{seconds / 3600:.3g} h"


def as_json(step: Step, placed: Sequence[OnLink], workers: int, interval: float | None, speeds: Mapping[str, Speeds]) -> dict[str, Any]:
    """Everything in a plan, as plain numbers; a link that is infinite is null."""
    return {
        "weights": step.units,
        "density": step.density,
        "changes": step.changes,
        "bytes_per_weight": step.width,
        "how": step.how,
        "bytes": dict(step.sizes) | {RAW: step.raw},
        "workers": workers,
        "interval": interval,
        "links": [
            {
                "link": each.link,
                "seconds": dict(each.seconds),
                "busy": None if each.busy is None else dict(each.busy),
                "training": each.useful,
                "fastest": each.choice.encoding,
            }
            for each in placed
        ],
        "borders": [{"link": link, "below": below, "above": above} for link, below, above in borders(step, workers, speeds)],
        "break_even": [
            {"link": link if math.isfinite(link) else None, "smaller": a, "larger": b} for link, a, b in break_evens(step, workers, speeds)
        ],
        "speeds": {
            name: {field: getattr(each, field) for field in ("encode_weight", "encode_change", "decode_weight", "decode_change")}
            for name, each in speeds.items()
        },
    }
