"""The figures of `bench.longrun`'s cells: density, bytes per change in every encoding, directions, k steps, and what history would save.

``python -m bench.longfigures runs/longrun`` reads the cells' stores and writes one page and one JSON file into bench/results.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import history
from bench.longrun import CELLS, Cell
from bench.machine import machine, slug
from bench.rivals import PAPER, RIVALS
from bench.steps import Step
from pulse import codec
from pulse.analysis import chain_of, count, figures
from pulse.analysis.sequences import Chain
from pulse.patch import apply_bits
from pulse.store import open_store
from pulse.versions import Versions

HERE = Path(__file__).parent
_TENTH = 10


def measured(cell: Cell, folder: Path, every: int, say: Any) -> dict[str, Any]:
    """All figures of one cell; those of a finished one are kept beside its store."""
    place = folder / f"figures-{every}.json"
    if place.is_file():
        kept: dict[str, Any] = json.loads(place.read_text())
        return kept
    found = measure(cell, folder, every, say)
    if (folder / "done").is_file():
        place.write_text(json.dumps(found))
    return found


def measure(cell: Cell, folder: Path, every: int, say: Any) -> dict[str, Any]:
    """All figures of one cell."""
    versions = Versions(open_store(folder / "store"))
    say(f"{cell.name}: counting")
    found = figures(count(chain_of(versions)), cell.learning_rate)
    say(f"{cell.name}: encoding")
    sizes = list(encoded(chain_of(versions), every))
    say(f"{cell.name}: history")
    past = [vars_of(row) for row in history.measure(chain_of(versions), every)]
    rewards = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    kept = ("weights", "share", "per_step", "over_k_steps", "per_kind", "step_sizes", "directions", "magnitudes", "critical")
    figure = {key: found[key] for key in kept}
    return {"cell": cell.name, "lr": cell.learning_rate, "rewards": rewards, "sizes": sizes, "history": past} | figure


def vars_of(row: history.Row) -> dict[str, float]:
    """A row with what follows from it."""
    return {name: getattr(row, name) for name in row.__slots__} | {"gain": row.gain, "total": row.total}


def encoded(chain: Chain, every: int) -> Any:
    """Bytes of every `every`-th step in each encoding, and in the paper's layout."""
    for moment, (patch, tensors) in enumerate(chain.patches(), 1):
        if moment % every and moment != 1:
            continue
        base = dict(tensors)
        step = Step(str(moment), "", "", base, apply_bits(patch, base))
        row = {encoding: len(codec.encode(patch, base, encoding=encoding)) for encoding in codec.ENCODINGS}
        yield {"step": moment, "changed": patch.changed, PAPER: len(RIVALS[PAPER](step.changes))} | row


def page(command: str, about: dict[str, str], cells: Sequence[dict[str, Any]]) -> str:
    """Everything that a person wants to see."""
    lines = [f"# The long run, {about['date']}", "", f"`{command}`", "", *[f"* {key}: {value}" for key, value in about.items()]]
    for cell in cells:
        lines += [
            "",
            f"## {cell['cell']}: lr {cell['lr']:g}",
            "",
            *by_tens(cell),
            "",
            *windows(cell),
            "",
            *encodings(cell),
            "",
            *remembered(cell),
        ]
    return "\n".join(lines) + "\n"


def by_tens(cell: dict[str, Any]) -> list[str]:
    """Reward, density, directions and the reference, in groups of ten steps."""
    rewards = {row["step"]: row["reward"] for row in cell["rewards"]}
    rows = [["steps", "reward", "changed", "±1", "changed before", "same way", "reference, B/change", "published, B/change"]]
    for _, group in groupby(enumerate(cell["per_step"]), key=lambda pair: pair[0] // _TENTH):
        numbers, steps = zip(*group, strict=True)
        changed, again = sum(step["changed"] for step in steps), sum(step["again"] for step in steps)
        same = sum((step["same_direction"] or 0) * step["again"] for step in steps)
        rows.append([
            f"{numbers[0] + 1} to {numbers[-1] + 1}",
            f"{sum(rewards[number] for number in numbers) / len(numbers):.2f}",
            f"{sum(step['share'] for step in steps) / len(steps):.3%}",
            f"{sum(step['steps_of_1'] * step['changed'] for step in steps) / max(changed, 1):.1%}",
            f"{again / max(changed, 1):.1%}",
            f"{same / again:.1%}" if again else "-",
            f"{sum(step['reference_bytes'] or 0 for step in steps) / max(changed, 1):.3f}",
            f"{sum(step['published_bytes'] or 0 for step in steps) / max(changed, 1):.3f}",
        ])  # fmt: skip
    return table(rows)


def windows(cell: dict[str, Any]) -> list[str]:
    """Density over k steps."""
    rows = cell["over_k_steps"]
    return table([["k", *(str(row["k"]) for row in rows)], ["changed over k steps", *(f"{row['share']:.3%}" for row in rows)]])


def encodings(cell: dict[str, Any]) -> list[str]:
    """Bytes per change of single steps."""
    names = [*codec.ENCODINGS, PAPER]
    rows = [["step", "changed", *(f"{name}, B/change" for name in names), "contextual / paper", "contextual / reference"]]
    for row in cell["sizes"]:
        reference = cell["per_step"][row["step"] - 1]["reference_bytes"]
        ratio = f"{row['contextual'] / reference:.3f}" if reference else "-"
        each = [f"{row[name] / row['changed']:.3f}" for name in names]
        rows.append([str(row["step"]), f"{row['changed']:,}", *each, f"{row['contextual'] / row[PAPER]:.3f}", ratio])
    return table(rows)


def remembered(cell: dict[str, Any]) -> list[str]:
    """What a receiver that remembers more than the base would save at most."""
    rows = [["version", "place, bits", "given its age", "step, bits", "given the last direction", "saved at most"]]
    for row in cell["history"]:
        figure = [f"{row[name]:.2f}" for name in ("place", "place_with_age", "step", "step_with_direction")]
        rows.append([str(row["version"]), *figure, f"{row['gain'] / row['total']:.1%}"])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as Markdown; the first is the header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "| " + " | ".join(["---:"] * len(rows[0])) + " |", *lines[1:]]


def main(arguments: list[str] | None = None) -> int:
    """Measure every cell that there is, and write."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench.longfigures", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/longrun"), help="what bench.longrun wrote (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between two that are encoded (default: %(default)s)")
    parser.add_argument("--cell", choices=[cell.name for cell in CELLS], help="only this one")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the page (default: bench/results)")
    options = parser.parse_args(arguments)
    about = machine()
    console = Console()
    with console.status("…") as status:
        there = [cell for cell in CELLS if (options.run / cell.name / "store").is_dir() and options.cell in (None, cell.name)]
        cells = [measured(cell, options.run / cell.name, options.every, status.update) for cell in there]
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "bench.longfigures", *arguments])
    texts = {
        ".md": page(command, about, cells),
        ".json": json.dumps({"command": command, "machine": about, "cells": cells}, indent=1) + "\n",
    }
    for suffix, text in texts.items():
        path = options.out / f"{slug()}-longrun{suffix}"
        path.write_text(text)
        console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
