"""What follows from the cells: sizes, ratios, rewards with their spread, paired differences, and times on a link. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

from bench.loco.settings import Setup

Row = dict[str, Any]
Cells = Mapping[str, Sequence[Row]]  # of each contestant, by seed

LINK = 100e6  # bit/s
# Student's t at 95 %, one side, by degrees of freedom: the ends of an interval that holds 90 %
_T95 = (math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and the interval around it that holds 90 % under Student's t."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """One contestant. Bytes are per rank and round; scores are (mean, deviation over seeds) after the last round.

    to_...: how many times smaller than dense DiLoCo in FP32, and than DDP's gradients of one window, FP32 or BF16; of payloads and of what
    crosses the wire. waiting: norm of what is left behind over the norm of A - L. invisible: share of the sent entries that the step did
    not make visible; unsent: share of the visible ones that nobody sent. seconds: of one core, per rank and round.
    """

    name: str
    density: float | None
    first_density: float | None
    last_density: float | None
    payload: float
    wire: float
    to_dense: float
    to_ddp: float
    to_ddp_bf16: float
    wire_to_dense: float
    wire_to_ddp: float
    wire_to_ddp_bf16: float
    patch: float
    view_changed: float
    union: float | None
    invisible: float | None
    unsent: float | None
    waiting: float | None
    age_mean: float
    age_max: int
    seconds: float
    score: tuple[float, float]
    held_out: tuple[float, float]
    greedy: float


def summary(name: str, cells: Sequence[Row], setup: Setup) -> Summary:
    """Everything about one contestant."""
    elements, rows = cells[0]["elements"], [row for cell in cells for row in cell["rows"]]
    payload, wire = mean(row["payload_bytes"] for row in rows), mean(row["wire_bytes"] for row in rows)
    dense, ring = 4 * elements, 2 * (setup.ranks - 1) / setup.ranks
    gradients = dense * setup.inner_steps
    sparse = "union" in rows[0]
    density = [mean(cell["rows"][i]["sent"] for cell in cells) / elements for i in range(setup.rounds)] if sparse else None
    keeps = any(row["waiting"] for row in rows)
    return Summary(
        name=name,
        density=mean(density) if density else None,
        first_density=density[0] if density else None,
        last_density=density[-1] if density else None,
        payload=payload,
        wire=wire,
        to_dense=dense / payload,
        to_ddp=gradients / payload,
        to_ddp_bf16=gradients / 2 / payload,
        wire_to_dense=ring * dense / wire,
        wire_to_ddp=ring * gradients / wire,
        wire_to_ddp_bf16=ring * gradients / 2 / wire,
        patch=mean(row["patch_bytes"] for row in rows),
        view_changed=mean(row["view_changed"] for row in rows) / elements,
        union=mean(row["union"] for row in rows) / elements if sparse else None,
        invisible=mean(map(invisible, rows)) if sparse else None,
        unsent=mean(map(unsent, rows)) if sparse else None,
        waiting=mean(cell["rows"][-1]["waiting"] / cell["rows"][-1]["moved"] for cell in cells) if keeps else None,
        age_mean=mean(cell["rows"][-1]["age_mean"] for cell in cells),
        age_max=max(cell["rows"][-1]["age_max"] for cell in cells),
        seconds=compute_seconds(cells),
        score=_spread([final(cell, "score") for cell in cells]),
        held_out=_spread([final(cell, "held_out") for cell in cells]),
        greedy=mean(final(cell, "greedy") for cell in cells),
    )


def final(cell: Row, score: str = "score") -> float:
    """A score after the last round."""
    found: float = cell["rows"][-1][score]
    return found


def invisible(row: Row) -> float:
    """The share of the entries that some rank sent which the step did not make visible."""
    return 1 - float(row["both"] / max(row["union"], 1))


def unsent(row: Row) -> float:
    """The share of the visible changes at entries that nobody sent: momentum, and what waited below a border."""
    return 1 - float(row["both"] / max(row["view_changed"], 1))


def compute_seconds(cells: Sequence[Row]) -> float:
    """Processor seconds of a rank in one round: sampling, training, and the exchange's arithmetic.

    Of all rounds the one that nine of ten exceed: first uses compile, and others that use the machine's caches slow it down.
    """
    found = sorted(float(sum(row["seconds"].values())) for cell in cells for row in cell["rows"])
    return found[len(found) // 10]


def paired(mine: Sequence[Row], theirs: Sequence[Row], value: Callable[[Row], float]) -> Interval:
    """The mean difference between cells of the same seed."""
    other = {cell["seed"]: value(cell) for cell in theirs}
    return interval([value(cell) - other[cell["seed"]] for cell in mine])


def interval(values: Sequence[float]) -> Interval:
    """The mean and its interval."""
    centre = mean(values)
    if len(values) == 1:
        return Interval(centre, -math.inf, math.inf)
    half = _T95[min(len(values) - 1, len(_T95) - 1)] * stdev(values) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half)


def rounds_to(cell: Row, level: float) -> float | None:
    """After how many rounds the score reached a level, between two of them in proportion; None if it did not."""
    scores = [float(cell["before"]["score"]), *(float(row["score"]) for row in cell["rows"])]
    for number, (before, after) in enumerate(pairwise(scores)):
        if after >= level:
            return number + max(level - before, 0.0) / max(after - before, 1e-12)
    return None


def round_seconds(cells: Sequence[Row], share: float = 1.0) -> float:
    """One round of a rank on the link: what it computes, and then what it receives (times `share`)."""
    wire = mean(float(row["wire_bytes"]) for cell in cells for row in cell["rows"])
    return compute_seconds(cells) + share * 8 * wire / LINK


def seconds_to(cells: Sequence[Row], level: float, share: float = 1.0) -> float | None:
    """Time to a score on the link; None unless all seeds reached it."""
    found = [rounds_to(cell, level) for cell in cells]
    reached = [number for number in found if number is not None]
    return mean(reached) * round_seconds(cells, share) if len(reached) == len(found) else None


def series(cells: Sequence[Row], value: Callable[[Row], float]) -> list[float]:
    """The mean over seeds, round by round."""
    return [mean(value(cell["rows"][i]) for cell in cells) for i in range(len(cells[0]["rows"]))]


def coded(cells: Sequence[Row]) -> list[tuple[int, int, dict[str, float]]]:
    """(round, entries, bytes per entry by way of writing), mean over seeds."""
    found = []
    for i, row in enumerate(cells[0]["rows"]):
        if "coded" in row:
            costs = [cell["rows"][i]["coded"] for cell in cells]
            entries = mean(one["entries"] for one in costs)
            found.append(
                (row["round"], round(entries), {key: mean(one[key] for one in costs) / entries for key in costs[0] if key != "entries"})
            )
    return found


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return mean(values), stdev(values) if len(values) > 1 else 0.0
