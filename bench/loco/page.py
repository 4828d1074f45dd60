"""The comparison as Markdown, as JSON, and as one page with plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from bench.loco import figures
from bench.loco.margin import MARGIN, REASON
from bench.loco.plots import plots
from bench.loco.tables import Results, tables
from bench.report import Grid

_KEPT = (
    *("score", "held_out", "greedy", "reward", "sent", "union", "both", "payload_bytes"),
    *("wire_bytes", "view_changed", "patch_bytes", "waiting", "moved", "stepped", "age_mean"),
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --back: #ffffff; --card: #f7f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf0; --soft: #98a2b3; --line: #333a47; --back: #14171d; --card: #1b1f27; } }
body { margin: 0 auto; max-width: 92rem; padding: 2rem 1.5rem 4rem; background: var(--back); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; } h2 { font-size: 1rem; margin: 0 0 .5rem; } ul { padding-left: 1.2rem; } .soft { color: var(--soft); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem; margin-top: 1.5rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; overflow-x: auto; margin-top: 1rem; }
.grid section { margin-top: 0; } svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; text-align: right; white-space: nowrap; } th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } tr + tr td { border-top: 1px solid var(--line); }
"""


def facts(results: Results) -> list[str]:
    """What was compared, in words."""
    setup = results.setup
    elements = next(iter(results.cells.values()))[0]["elements"]
    seeds = sorted({cell["seed"] for cells in results.cells.values() for cell in cells})
    model = f"model: decoder, {setup.layers} layers of width {setup.width}, {elements:,} FP32 parameters, median |w| {results.median:.3g}"
    task = (
        f"task: sums of two {setup.digits}-digit numbers; the model was taught {setup.right:.0%} right answers; in the others 9 - d stands "
        "for every digit d"
    )
    rollouts = (
        f"GRPO: {setup.prompts} prompts x {setup.group} samples per inner step, sampled with the BF16 view of the weights at the window's "
        f"border, so up to {setup.inner_steps} steps stale, for all methods alike; clip 0.2, no KL term"
    )
    inner = (
        f"inner: AdamW, lr {setup.lr:g}, eps {setup.epsilon:g}, no decay, BF16 autocast; R = {setup.ranks}, H = {setup.inner_steps}, "
        f"{setup.rounds} rounds, {setup.tokens_per_round * setup.rounds:,} answer tokens"
    )
    outer = (
        "outer: Nesterov 0.7, 0.9 for pulseloco and diloco; 1.0 without momentum for localsgd and sparseloco (64 of 4,096, decay 0.95), "
        "which, as ddp, are shown at 7 times the inner lr too: that is what Nesterov makes of a steady direction"
    )
    pairs = f"seeds {', '.join(map(str, seeds))}: the same prompts and sampling noise for all methods"
    proof = "digests of the shared weights were equal on all ranks after every round"
    about = [f"{key}: {value}" for key, value in results.machine.items()]
    return [*about, model, task, rollouts, inner, outer, pairs, proof, f"margin: {MARGIN}; {REASON}"]


def markdown(results: Results) -> str:
    """The page for bench/results."""
    about = "\n".join(f"* {fact}" for fact in facts(results))
    pages = [f"# PULSELoCo beside its rivals, {results.machine['date']}\n\n`{results.command}`\n\n{about}"]
    for grid in tables(results):
        notes = "\n".join(f"* {note}" for note in grid.notes)
        lines = [_line(grid.header), _line(["---"] + ["---:"] * (len(grid.header) - 1)), *map(_line, grid.rows)]
        pages.append(f"## {grid.title}\n\n{notes}\n\n" + "\n".join(lines))
    return "\n\n".join(pages) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_json(results: Results) -> str:
    """Settings, summaries, and round by round the means over seeds."""
    series = {
        name: {key: [float(f"{value:.5g}") for value in figures.series(cells, _value(key))] for key in _KEPT if key in cells[0]["rows"][0]}
        for name, cells in results.cells.items()
    }
    finals = {name: {str(cell["seed"]): figures.final(cell) for cell in cells} for name, cells in results.cells.items()}
    found: dict[str, Any] = {"command": results.command, "machine": results.machine, "setup": asdict(results.setup), "margin": MARGIN}
    found |= {"summaries": [asdict(one) for one in results.summaries], "finals": finals, "series": series}
    return json.dumps(found, indent=1) + "\n"


def _value(key: str) -> Any:
    return lambda row: float(row[key])


def html(results: Results) -> str:
    """The whole report in one file: nothing is loaded from anywhere, light and dark follow the reader's settings."""
    title = "PULSELoCo beside its rivals"
    drawn = [f"<section><h2>{escape(name)}</h2>{svg}</section>" for name, svg in plots(results.cells)]
    body = [
        f"<h1>{title}</h1><p><code>{escape(results.command)}</code></p>",
        "<ul>" + "".join(f"<li>{escape(fact)}</li>" for fact in facts(results)) + "</ul>",
        '<div class="grid">' + "".join(drawn) + "</div>",
        *map(_section, tables(results)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _section(grid: Grid) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    notes = "".join(f"<li>{escape(note)}</li>" for note in grid.notes)
    table = "<table>" + row(grid.header, "th") + "".join(row(cells, "td") for cells in grid.rows) + "</table>"
    return f'<section><h2>{escape(grid.title)}</h2><ul class="soft">{notes}</ul>{table}</section>'


def write(results: Results, report: Path, folder: Path, name: str) -> list[Path]:
    """`report`, and NAME.md and NAME.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {report: html(results), folder / f"{name}.md": markdown(results), folder / f"{name}.json": as_json(results)}
    for path, text in texts.items():
        path.write_text(text)
    return list(texts)
