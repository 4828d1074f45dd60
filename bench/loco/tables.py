"""The comparison as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.loco import figures
from bench.loco.coded import WAYS
from bench.loco.figures import Cells, Interval, Summary
from bench.loco.margin import MARGIN
from bench.loco.settings import Setup
from bench.report import Grid

LEVELS = (0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Results:
    """One run of the comparison. median: |w| of the starting model."""

    command: str
    machine: dict[str, str]
    setup: Setup
    median: float
    cells: Cells
    summaries: tuple[Summary, ...]


def tables(results: Results) -> Iterator[Grid]:
    """Every table, in order."""
    yield sizes(results)
    yield wires(results)
    yield scores(results)
    yield verdicts(results)
    yield times(results)
    yield visibility(results)
    if results.cells.get("pulseloco") and figures.coded(results.cells["pulseloco"]):
        yield codings(results)
    yield development(results)


def sizes(results: Results) -> Grid:
    """What a rank hands to the exchange."""
    notes = (
        "payload: bytes per rank and round, everything included; DDP's are the gradients of the same window",
        "x: how many times smaller than dense DiLoCo in FP32, and than DDP's gradients over the window",
        "patch: what PULSESync sends of the shared view's step, contextual, everything included",
    )
    header = "method", "density", "first … last round", "payload", "x DiLoCo", "x DDP FP32", "x DDP BF16", "view changed", "patch"
    rows = tuple(
        (
            one.name,
            _percent(one.density),
            "" if one.first_density is None else f"{_percent(one.first_density)} … {_percent(one.last_density)}",
            f"{one.payload:,.0f}",
            f"{one.to_dense:.3g}",
            f"{one.to_ddp:.3g}",
            f"{one.to_ddp_bf16:.3g}",
            _percent(one.view_changed),
            f"{one.patch:,.0f}",
        )
        for one in results.summaries
    )
    return Grid("Payloads", notes, header, rows)


def wires(results: Results) -> Grid:
    """What crosses the wire."""
    ranks = results.setup.ranks
    notes = (
        f"received per rank and round, R = {ranks}: of sparse payloads those of all others, R - 1; of dense ones 2 (R - 1) / R, in a ring",
        "x: how many times less than dense DiLoCo in FP32, and than DDP's gradients over the window, both in a ring",
        "seconds: processor time of one core, per rank and round: sampling, training, gate and coding, decoding, outer step",
        "nine of ten rounds took longer than that: others used the machine",
    )
    header = "method", "wire", "x DiLoCo", "x DDP FP32", "x DDP BF16", "seconds computing", "on 100 Mbit/s"
    rows = tuple(
        (
            one.name,
            f"{one.wire:,.0f}",
            f"{one.wire_to_dense:.3g}",
            f"{one.wire_to_ddp:.3g}",
            f"{one.wire_to_ddp_bf16:.3g}",
            f"{one.seconds:.2f}",
            f"{8 * one.wire / figures.LINK:.2f}",
        )
        for one in results.summaries
    )
    return Grid("On the wire", notes, header, rows)


def scores(results: Results) -> Grid:
    """What was learnt."""
    before = next(iter(results.cells.values()))[0]["before"]
    start = f"before: {before['score']:.3f} on sums that are trained on, {before['held_out']:.3f} on held-out ones"
    notes = (
        f"the probability of a right answer when the policy samples, exact, on {results.setup.scored} sums; mean ± deviation over seeds",
        f"{start}, of which {before['greedy']:.1%} are guessed right: their likeliest answer is the right one",
        "against DiLoCo: the difference at the end, paired by seed, with the interval that holds 90 % under Student's t",
        "behind: how many rounds later than DiLoCo a level is reached, paired by seed",
    )
    header = "method", "final reward", "held out", "guessed right", "against DiLoCo", *(f"behind at {level}" for level in LEVELS)
    dense = results.cells.get("diloco", ())
    rows = tuple(
        (
            one.name,
            _spread(one.score),
            _spread(one.held_out),
            _percent(one.greedy),
            _interval(figures.paired(results.cells[one.name], dense, figures.final)) if dense else "",
            *(_behind(results, one.name, level) for level in LEVELS),
        )
        for one in results.summaries
    )
    return Grid("Learning", notes, header, rows)


def _behind(results: Results, name: str, level: float) -> str:
    mine = {cell["seed"]: figures.rounds_to(cell, level) for cell in results.cells[name]}
    theirs = {cell["seed"]: figures.rounds_to(cell, level) for cell in results.cells.get("diloco", ())}
    pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    behind = [a - b for a, b in pairs if a is not None and b is not None]
    return f"{sum(behind) / len(behind):+.1f}" if behind and len(behind) == len(pairs) else "-"


def verdicts(results: Results) -> Grid:
    """Whether each method is no worse than dense DiLoCo, by the margin."""
    notes = (
        f"met: the lower end of the interval is above -{MARGIN}: not worse than dense DiLoCo by more than that, at 95 %",
        "not met: the mean difference is below it; undecided: the mean is above, the lower end below",
        "the margin, with its reason, is in bench/loco/margin.py, from before the first result",
    )
    dense = results.cells.get("diloco", ())
    rows = []
    for name, cells in results.cells.items():
        if name != "diloco" and dense:
            found = figures.paired(cells, dense, figures.final)
            each = figures.paired(cells, dense, lambda cell: figures.final(cell, "held_out"))
            rows.append((name, _interval(found), verdict(found), _interval(each), verdict(each)))
    return Grid("No worse than DiLoCo?", notes, ("method", "reward", "verdict", "held out", "verdict"), tuple(rows))


def verdict(found: Interval, margin: float = MARGIN) -> str:
    """Met, not met, or undecided."""
    if found.low > -margin:
        return "met"
    return "not met" if found.mean <= -margin else "undecided"


def times(results: Results) -> Grid:
    """Time to a reward on a link."""
    notes = (
        "seconds until the reward is reached on a link of 100 Mbit/s: the rank computes, then receives; nothing overlaps; mean over seeds",
        "DDP with BF16 gradients is taken as the same run with half the bytes",
    )
    rows = []
    for name, cells in results.cells.items():
        for shown, share in ((name, 1.0), *([(f"{name}, BF16 gradients", 0.5)] if name.startswith("ddp") else [])):
            rows.append((shown, *(_number(figures.seconds_to(cells, level, share), ".0f") for level in LEVELS)))
    return Grid("Time to a reward", notes, ("method", *(f"to {level}" for level in LEVELS)), tuple(rows))


def visibility(results: Results) -> Grid:
    """What is sent against what is seen, and what waits."""
    notes = (
        "union: entries that any rank sent; invisible: share of them that the outer step did not make visible",
        "unsent: share of the visible changes at entries that nobody sent",
        "waits: at the end, the norm of what a rank has not sent over that of A - L of one window; ages in rounds, of what waits",
        "with the rest in masters, A - L holds what waits",
    )
    header = "method", "union", "sent, invisible", "visible, unsent", "waits", "mean age", "oldest"
    rows = tuple(
        (
            one.name,
            _percent(one.union),
            _percent(one.invisible),
            _percent(one.unsent),
            _number(one.waiting, ".2f"),
            f"{one.age_mean:.1f}" if one.age_max else "",
            str(one.age_max or ""),
        )
        for one in results.summaries
        if one.union is not None or one.waiting is not None
    )
    return Grid("Sent, seen, waiting", notes, header, rows)


def codings(results: Results) -> Grid:
    """What an entry costs."""
    found = figures.coded(results.cells["pulseloco"])
    elements = results.cells["pulseloco"][0]["elements"]
    notes = ("the same entries of pulseloco, written in several ways; bytes per entry, everything included, mean over seeds",)
    header = "way", *(f"round {number}, {entries / elements:.2%}" for number, entries, _ in found)
    rows = [(f"{way} ({about})" if about else way, *(f"{costs[way]:.2f}" for *_, costs in found)) for way, about in WAYS.items()]
    rows.append(("of pulse: positions", *(f"{costs['positions']:.2f}" for *_, costs in found)))
    return Grid("What an entry costs", notes, header, tuple(rows))


def development(results: Results) -> Grid:
    """Round by round, of pulseloco beside diloco."""
    both = [cells for name in ("pulseloco", "diloco") for cells in [results.cells.get(name, ())]]
    if not all(both):
        return Grid("Round by round", ("needs pulseloco and diloco",), ("round",), ())
    n = both[0][0]["elements"]
    columns = {
        "reward": (lambda row: row["score"], ".3f", both[0]),
        "reward, diloco": (lambda row: row["score"], ".3f", both[1]),
        "density": (lambda row: row["sent"] / n, ".2%", both[0]),
        "x DiLoCo": (lambda row: 4 * n / row["payload_bytes"], ".1f", both[0]),
        "B/entry": (lambda row: row["payload_bytes"] / row["sent"], ".2f", both[0]),
        "union": (lambda row: row["union"] / n, ".2%", both[0]),
        "view changed": (lambda row: row["view_changed"] / n, ".2%", both[0]),
        "… diloco": (lambda row: row["view_changed"] / n, ".2%", both[1]),
        "patch": (lambda row: row["patch_bytes"], ",.0f", both[0]),
        "… diloco ": (lambda row: row["patch_bytes"], ",.0f", both[1]),
        "sent, invisible": (figures.invisible, ".1%", both[0]),
        "visible, unsent": (figures.unsent, ".1%", both[0]),
        "waits": (lambda row: row["waiting"] / row["moved"], ".2f", both[0]),
        "mean age": (lambda row: row["age_mean"], ".1f", both[0]),
    }
    drawn = [[format(value, how) for value in figures.series(cells, of)] for of, how, cells in columns.values()]
    rows = tuple((str(i), *cells) for i, cells in enumerate(zip(*drawn, strict=True), 1) if i <= 5 or i % 5 == 0)
    return Grid("Round by round: pulseloco, beside diloco", ("means over seeds",), ("round", *columns), rows)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _spread(values: tuple[float, float]) -> str:
    return f"{values[0]:.3f} ± {values[1]:.3f}"


def _interval(found: Interval) -> str:
    return f"{found.mean:+.4f} ({found.low:+.4f} … {found.high:+.4f})"
