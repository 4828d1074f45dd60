"""`python -m bench.loco`: play every cell that is not there yet, then write the pages."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from bench.loco import cells, figures, page
from bench.loco.model import Decoder
from bench.loco.settings import CONTESTANTS, FULL, QUICK, Contestant, Setup
from bench.loco.start import starting_model
from bench.loco.tables import Results
from bench.machine import machine, slug

RESULTS = Path(__file__).parent.parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Play, measure, write."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _options(arguments)
    torch.set_num_threads(1)
    about, console = machine(), Console()
    setup = QUICK if options.quick else FULL
    setup = replace(setup, rounds=options.rounds or setup.rounds)
    chosen = [one for one in CONTESTANTS if one.name in (options.only or [one.name])]
    _same_setup(options.run, setup)
    with console.status("…") as status:
        say = status.update if console.is_terminal else print
        start = starting_model(setup, options.run, say)
        found = played(chosen, options.seeds, setup, start, options.run / "cells", say)
    summaries = tuple(figures.summary(name, rows, setup) for name, rows in found.items())
    command = shlex.join(["python", "-m", "bench.loco", *arguments])
    results = Results(command, about, setup, median_of(start), found, summaries)
    name = slug() + "-loco" + ("-quick" if options.quick else "") + (f"-{options.rounds}-rounds" if options.rounds else "")
    for path in page.write(results, options.run / "report.html", options.out, name):
        console.print(f"written: {path}")
    return 0


def played(chosen: list[Contestant], seeds: list[int], setup: Setup, start: Decoder, folder: Path, say: cells.Say) -> figures.Cells:
    """All cells, seed after seed, so that an early look has all contestants."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[cells.Row]] = {one.name: [] for one in chosen}
    for seed in seeds:
        for one in chosen:
            found[one.name].append(cells.play(cells.Cell(one, seed), setup, start, folder, say))
    return found


def median_of(model: Decoder) -> float:
    """The median |w|."""
    return float(torch.cat([weight.detach().abs().view(-1) for weight in model.parameters()]).median())


def _same_setup(run: Path, setup: Setup) -> None:
    """Cells of another setup are not to be mixed with these."""
    run.mkdir(parents=True, exist_ok=True)
    place, text = run / "setup.json", json.dumps(asdict(setup), indent=1)
    if place.is_file() and place.read_text() != text:
        raise SystemExit(f"{run} holds cells of another setup: choose another folder by --run, or remove it")
    place.write_text(text)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.loco", description=__doc__)
    parser.add_argument("--run", type=Path, help="folder for model, cells and report (default: runs/loco-compare)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and three rounds: seconds, and no meaning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in CONTESTANTS], help="only these contestants")
    parser.add_argument("--rounds", type=int, help=f"of every cell (default: {FULL.rounds}; with --quick {QUICK.rounds})")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the pages (default: bench/results)")
    options = parser.parse_args(arguments)
    options.run = options.run or Path("runs/loco-compare-quick" if options.quick else "runs/loco-compare")
    return options


if __name__ == "__main__":
    sys.exit(main())
