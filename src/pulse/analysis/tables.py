"""Figures as tables of text, for a terminal and for a page: one screen, so long ones are shortened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pulse.analysis.numbers import LAYOUTS

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A title, headings, and rows; the first column is text, the others are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def percent(share: float | None, digits: int = 3) -> str:
    """A share for people."""
    return "-" if share is None else f"{100 * share:.{digits}g} %"


def power(magnitude: float | None) -> str:
    """A power of two in decimal, or that there is none so small."""
    return "0" if magnitude == 0 else "-" if magnitude is None else f"{magnitude:.2e}"


def shortened(rows: Sequence[tuple[str, ...]], most: int) -> tuple[tuple[str, ...], ...]:
    """At most that many rows: the first and the last ones, and in the middle how many are left out."""
    if len(rows) <= most:
        return tuple(rows)
    first, last = most // 2, most - most // 2 - 1
    gap = (f"… {len(rows) - first - last} more", *([""] * (len(rows[0]) - 1)))
    return (*rows[:first], gap, *rows[len(rows) - last :])


def largest(rows: Sequence[Row], most: int, weight: Callable[[Row], float]) -> list[Row]:
    """The rows of most weight, at most that many, in the order in which they are."""
    kept = sorted(range(len(rows)), key=lambda i: -weight(rows[i]))[:most]
    return [rows[i] for i in sorted(kept)]


def overview(found: Row) -> list[str]:
    """What the history is, and the figures that one wants first, as lines."""
    dtypes = ", ".join(f"{name} {units:,}" if len(found["dtypes"]) > 1 else name for name, units in found["dtypes"].items())
    median = found["magnitudes"]["median"]
    middle = "-" if median is None else f"{median:.3g}"
    lines = [f"{found['weights']:,} weights in {found['tensors']:,} tensors ({dtypes}); median |w| {middle}"]
    lines += [
        f"at lr {row['learning_rate']:g} a step reaches half a {row['view']} ulp below |w| = {row['magnitude']:.2e}: "
        f"{percent(row['share'])} of the {row['dtype']} weights; at most (10 lr) {percent(row['worst_share'])}"
        for row in found["critical"] or []
    ]
    if not found["steps"]:
        return [*lines, "one set of weights: give two or more to see what changes"]
    lowest, highest = (function(row["share"] for row in found["per_step"]) for function in (min, max))
    ones = found["step_sizes"][0]["share"] if found["step_sizes"] else None
    spread = f"{percent(lowest)} to {percent(highest)}"
    lines.append(f"changed per step: {percent(found['share'])} ({spread}); {percent(ones)} of the steps are ±1")
    known = [row for row in found["per_step"] if row["reference_bytes"] is not None and row["changed"]]
    if known:
        nbytes, changed = (sum(row[key] for row in known) for key in ("reference_bytes", "changed"))
        lines.append(f"reference entropy: {nbytes / changed:.3f} B per change, {nbytes / len(known) / 1e6:.3g} MB per step")
    same = found["directions"]["same_direction"]
    if same is not None:
        again = f"{found['directions']['again']:,}"
        lines.append(f"direction: {percent(same)} of the {again} changes of a weight that had changed go the same way as last time")
    return lines


def tables(found: Row, most: int = 13) -> list[Table]:
    """The tables of a screen. most: rows of each."""
    if not found["steps"]:
        return [_magnitudes(found, most)]
    views = [_views(found)] if found["views"] else []
    wide = [_steps(found, most), _over(found), _kinds(found), _classes(found, most)]
    return [*wide, _magnitudes(found, most), _sizes(found, most), _directions(found, most), *views]


def tensor_table(found: Row) -> Table:
    """Every tensor, those with the largest share of changes first."""
    rows = sorted(found["per_tensor"], key=lambda row: (-row["share"], row["name"]))
    cells = [(row["name"], row["kind"], f"{row['dtype']}{row['shape']}", f"{row['changed']:,}", percent(row["share"])) for row in rows]
    return Table("tensors", ("tensor", "kind", "type", "changed", "per step"), tuple(cells))


def _steps(found: Row, most: int) -> Table:
    published = any(row["published_bytes"] for row in found["per_step"])
    rows = [
        (
            row["to"],
            f"{row['changed']:,}",
            percent(row["share"]),
            percent(row["steps_of_1"]),
            percent(row["same_direction"]),
            "-" if row["reference_bytes_per_change"] is None else f"{row['reference_bytes_per_change']:.3f}",
            *([_per_change(row)] if published else []),
        )
        for row in found["per_step"]
    ]
    headings = ("step to", "changed", "share", "±1", "same way", "ref. B", *(["publ. B"] if published else []))
    return Table("each step (B per change)", headings, shortened(rows, most))


def _per_change(row: Row) -> str:
    return f"{row['published_bytes'] / row['changed']:.3f}" if row["published_bytes"] and row["changed"] else "-"


def _over(found: Row) -> Table:
    rows = [(str(row["k"]), percent(row["share"]), percent(row["lowest"]), percent(row["highest"])) for row in found["over_k_steps"]]
    return Table("over k steps", ("k", "changed", "lowest", "highest"), tuple(rows))


def _kinds(found: Row) -> Table:
    rows = [
        (row["kind"], str(row["tensors"]), percent(row["weights"] / max(found["weights"], 1)), percent(row["share"]))
        for row in found["per_kind"]
    ]
    return Table("kinds of layer", ("kind", "tensors", "weights", "changed"), tuple(rows))


def _classes(found: Row, most: int) -> Table:
    total = sum(row["weights"] for row in found["per_class"])
    several = len({row["dtype"] for row in found["per_class"]}) > 1
    rows = [
        (
            _class_name(row) + (f" {row['dtype']}" if several else ""),
            percent(row["weights"] / total),
            percent(row["changed"] / found["changed"]) if found["changed"] else "-",
            percent(row["share"]),
        )
        for row in largest(found["per_class"], most, lambda row: float(row["changed"]))
    ]
    return Table("exponent classes with most changes", ("|w| from", "weights", "changes", "changed"), tuple(rows))


def _class_name(row: Row) -> str:
    """Where a class begins; the highest of the IEEE types holds no numbers."""
    top = LAYOUTS[row["dtype"]].classes - 1
    return "inf, NaN" if row["class"] == top and not row["dtype"].startswith(("F8_E4M3", "F8_E5M2FNUZ")) else power(row["from"])


def _directions(found: Row, most: int) -> Table:
    rows = [(str(row["steps_since"]), f"{row['changes']:,}", percent(row["same_direction"])) for row in found["directions"]["since"]]
    return Table("changed again, by steps since", ("steps", "changes", "same way"), shortened(rows, most))


def _sizes(found: Row, most: int) -> Table:
    rows = []
    for row in (row for row in found["step_sizes"] if row["changes"]):
        name = str(row["from"]) if row["from"] == row["to"] else f"{row['from']:,} to {row['to']:,}"
        rows.append((name if row["to"] < 1e6 else f"{row['from']:.0e} …", percent(row["share"])))
    return Table("|step|", ("numbers", "changes"), shortened(rows, most))


def _magnitudes(found: Row, most: int) -> Table:
    held = found["magnitudes"]
    rows = [(power(row["from"]), percent(row["share"])) for row in largest(held["binades"], most - 2, lambda row: float(row["weights"]))]
    rows += [(name, f"{held[key]:,}") for name, key in (("zero", "zero"), ("inf, NaN", "not_finite")) if held[key]]
    return Table("|w| at the start", ("from", "weights"), tuple(rows))


def _views(found: Row) -> Table:
    rows = [(row["view"] if row["view"] != row["dtype"] else f"{row['dtype']} itself", percent(row["share"])) for row in found["views"]]
    return Table("in views of lower precision", ("view", "changed"), tuple(rows))
