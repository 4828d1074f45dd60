"""`python -m bench`: what a step costs, in bytes and in time, ours and others', as one table for this machine and day."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report, rounds, sizes, speeds
from bench.machine import machine, slug
from bench.steps import Step, stored, synthetic, trace

HERE = Path(__file__).parent
TRACE = HERE.parent / "tests" / "data" / "trace"
QUICK_PARAMS = 2e7


def main(arguments: list[str] | None = None) -> int:
    """Measure, show, write."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _options(arguments)
    console = Console()
    about = machine()
    with console.status("…") as status:
        tables = [] if options.no_sizes else [sizes.measure(step, status.update) for step in _real(options)]
        status.update("made-up weights")
        made = synthetic(options.params, options.synthetic_lr)
        tables += [] if options.no_sizes else [sizes.measure(made, status.update)]
        measured = None if options.no_speeds else speeds.measure(made, options.rounds, status.update)
        together = None if options.no_loco else rounds.measure(options.loco_params, options.rounds, status.update)
    results = report.Results(shlex.join(["python", "-m", "bench", *arguments]), about, tuple(tables), measured, together)
    report.show(console, results)
    for path in report.write(options.out, slug() + ("-quick" if options.quick else "") + _part(options), results):
        console.print(f"written: {path}")
    return 0 if all(row.exact is not False for table in tables for row in table.rows) else 1


def _real(options: argparse.Namespace) -> Iterator[Step]:
    yield from trace("slice of a model", TRACE, "3e-06", "FP32 masters spread in their cells, BF16 view; weights once 4-bit")
    for folder, lr, regime in options.trace:
        yield from trace(Path(folder).name, Path(folder), lr, regime)
    for url, versions, lr, regime in options.store:
        yield from stored(url, [(int(old), int(new)) for old, new in (pair.split(":") for pair in versions.split(","))], lr, regime)


def _part(options: argparse.Namespace) -> str:
    """What the table holds, if that is not everything, for its name."""
    parts = {"sizes": not options.no_sizes, "speeds": not options.no_speeds, "round": not options.no_loco}
    return "" if all(parts.values()) else "".join(f"-{name}" for name, kept in parts.items() if kept)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--quick", action="store_true", help=f"the trace, and {QUICK_PARAMS:g} made-up weights: under a minute")
    parser.add_argument(
        "--trace", nargs=3, metavar=("DIR", "LR", "REGIME"), **several, help="also a folder of consecutive .safetensors files; repeatable"
    )
    parser.add_argument(
        "--store",
        nargs=4,
        metavar=("URL", "VERSIONS", "LR", "REGIME"),
        **several,
        help="also whole models: versions as 5:6,20:21; repeatable",
    )
    parser.add_argument("--params", type=float, help="made-up weights (default: 1e9)")
    parser.add_argument("--synthetic-lr", type=float, default=1.25e-6, help="their learning rate (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="of the speeds (default: 5, or 3 with --quick)")
    parser.add_argument("--loco-params", type=float, help="made-up weights of the PULSELoCo round (default: 1e8)")
    parser.add_argument("--no-sizes", action="store_true", help="leave out the sizes")
    parser.add_argument("--no-speeds", action="store_true", help="leave out the speeds: they want a machine that does nothing else")
    parser.add_argument("--no-loco", action="store_true", help="leave out the PULSELoCo round: it wants the same")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the table (default: bench/results)")
    options = parser.parse_args(arguments)
    options.params = options.params or (QUICK_PARAMS if options.quick else 1e9)
    options.loco_params = options.loco_params or (QUICK_PARAMS if options.quick else rounds.PARAMS)
    options.rounds = options.rounds or (3 if options.quick else 5)
    return options


if __name__ == "__main__":
    sys.exit(main())
