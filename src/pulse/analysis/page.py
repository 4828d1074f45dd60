"""One page of HTML with plots of an analysis, in one file: nothing is loaded from anywhere, light and dark follow the reader's settings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from pulse.analysis.plots import Series, bars, lines
from pulse.analysis.tables import Table, overview, tables, tensor_table

Row = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --back: #ffffff; --card: #f7f8fa;
        --c0: #2f6fde; --c1: #d9691e; --c2: #2b9348; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf0; --soft: #98a2b3; --line: #333a47; --back: #14171d; --card: #1b1f27;
        --c0: #7aa7ff; --c1: #f2a266; --c2: #6fcf8b; } }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.5rem 4rem; background: var(--back); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 0 0 .5rem; }
ul { padding-left: 1.2rem; } .soft { color: var(--soft); }
.flow { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1rem; margin-top: 1rem; } .flow section { max-width: 100%; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(23rem, 1fr)); gap: 1rem; margin-top: 1.5rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; overflow-x: auto;
          box-sizing: border-box; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .axis { stroke: var(--line); } svg .line { fill: none; stroke-width: 1.8; } svg rect { opacity: .9; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; text-align: right; white-space: nowrap; } th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } tr + tr td { border-top: 1px solid var(--line); }
"""
_NOTE = (
    "Made by <code>pulse analyze --html</code>. Shares are of the weights that a plot or row is about. Steps of a value count "
    "representable numbers; the reference entropy is what positions and steps cost if exponent classes are known."
)


def page(title: str, found: Row) -> str:
    """The whole page. found: what `figures` returns."""
    body = [
        f"<h1>{escape(title)}</h1>",
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in overview(found)) + "</ul>",
        '<div class="grid">' + "".join(_section(name, drawn) for name, drawn in _plots(found)) + "</div>",
        '<div class="flow">' + "".join(_section(table.title, _table(table)) for table in tables(found, 40)) + "</div>",
        '<div class="flow">' + _section("tensors", _table(tensor_table(found))) + "</div>",
        f'<p class="soft">{_NOTE}</p>',
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{"".join(body)}</body></html>\n'


def _plots(found: Row) -> list[tuple[str, str]]:
    """Titles and drawings; of one set of weights there is only |w|."""
    binades = found["magnitudes"]["binades"]
    sizes = bars([f"2^{row['power']}" for row in binades], [100 * row["share"] for row in binades], "% of weights")
    if not found["steps"]:
        return [("|w| by powers of two", sizes)]
    steps = found["per_step"]
    at = list(range(1, len(steps) + 1))
    way = [(i, 100 * row["same_direction"]) for i, row in zip(at, steps, strict=True) if row["same_direction"] is not None]
    cost = [
        Series(name, [(i, row[key] / row["changed"]) for i, row in zip(at, steps, strict=True) if row[key] is not None and row["changed"]])
        for name, key in (("reference entropy", "reference_bytes"), ("published", "published_bytes"))
    ]
    windows = [(row["k"], 100 * row["share"]) for row in found["over_k_steps"]]
    kinds = found["per_kind"]
    classes = [row for row in found["per_class"] if row["from"]]
    since = [(row["steps_since"], 100 * row["same_direction"]) for row in found["directions"]["since"]]
    moved = found["step_sizes"][:16]
    return [
        ("changed per step", lines([Series("changed", [(i, 100 * row["share"]) for i, row in zip(at, steps, strict=True)])], "step", "%")),
        ("changed over k steps", lines([Series("mean", windows)], "k", "%", marks=True)),
        ("bytes per change", lines([series for series in cost if series.points], "step", "B")),
        ("same direction as the last change", lines([Series("same way", way)], "step", "%")),
        ("… by steps since the last change", lines([Series("same way", since)], "steps since", "%", marks=True)),
        ("changed, by kind of layer", bars([row["kind"] for row in kinds], [100 * row["share"] for row in kinds], "% per step")),
        ("changed, by |w| of the exponent class", lines(_by_class(classes), "log2 |w|", "%", marks=True)),
        ("|step| in representable numbers", bars([_span(row) for row in moved], [100 * row["share"] for row in moved], "% of changes")),
        ("|w| by powers of two", sizes),
    ]


def _span(row: Row) -> str:
    return str(row["from"]) if row["from"] == row["to"] else f"≤{row['to']}"


def _by_class(rows: Sequence[Row]) -> list[Series]:
    from math import log2

    names = sorted({row["dtype"] for row in rows})
    return [Series(name, [(log2(row["from"]), 100 * row["share"]) for row in rows if row["dtype"] == name]) for name in names]


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(table.headings, "th") + "".join(row(cells, "td") for cells in table.rows) + "</table>"
