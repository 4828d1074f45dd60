"""``python -m demo``: the main job, end to end. ``--exact`` compares patches with whole checkpoints instead."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from demo.exact import compare
from demo.fleet import RunError
from demo.model import DEFAULT_MODEL
from demo.options import interrupt, positive, prepared, seed, store_of
from demo.report import write_report
from demo.run import Run, fresh_folder
from demo.settings import Settings
from demo.show import Narrator, facts, table
from demo.summary import summarise

EXACT_STEPS = 4


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and say what came out: 0 if everything was verified, 1 if not, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, interrupt)
    console = Console(width=None if sys.stdout.isatty() else 190)
    try:
        model = prepared(options.model, console)
        return _exact(options, model, console) if options.exact else _demo(options, model, console)
    except RunError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every process has been ended")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory or hub name (default: %(default)s, out of a pip package)")
    parser.add_argument("--steps", type=positive, help="optimizer steps (default: 20; with --exact 4)")
    parser.add_argument("--workers", type=positive, default=2, help="inference workers (default: %(default)s)")
    parser.add_argument("--store", help="where versions travel: a folder or a URL (default: a folder in the run's folder)")
    parser.add_argument("--seed", type=seed, default=0, help="everything follows from it (default: %(default)s)")
    parser.add_argument("--run", type=Path, help="folder for the run's records (default: runs/demo; with --exact runs/exact)")
    parser.add_argument(
        "--prompts",
        type=int,
        choices=range(1, 13),
        metavar="N",
        default=Settings.prompts_per_step,
        help="prompts per step (default: %(default)s)",
    )
    parser.add_argument(
        "--held-out",
        type=int,
        choices=range(1, 11),
        metavar="N",
        default=Settings.held_out,
        help="held-out problems (default: %(default)s)",
    )
    parser.add_argument("--sync", choices=("patch", "checkpoint"), default="patch", help="how weights travel (default: %(default)s)")
    parser.add_argument("--no-kill", action="store_true", help="do not kill a worker half way")
    parser.add_argument("--exact", action="store_true", help="compare patches with whole checkpoints, to the last bit")
    return parser


def _settings(options: argparse.Namespace, model: str, folder: Path, steps: int) -> Settings:
    samples = Settings.samples_per_prompt
    return Settings(
        run=str(folder),
        model=model,
        store=store_of(options.store, folder),
        sync=options.sync,
        steps=options.steps or steps,
        workers=options.workers,
        seed=options.seed,
        prompts_per_step=options.prompts,
        held_out=options.held_out,
        micro_batch=samples * next(groups for groups in (3, 2, 1) if options.prompts % groups == 0),
    )


def _demo(options: argparse.Namespace, model: str, console: Console) -> int:
    folder = fresh_folder(options.run or Path("runs/demo"))
    settings = _settings(options, model, folder, Settings.steps)
    console.print(
        f"GRPO on {Path(model).name}: {settings.steps} steps, {settings.workers} workers that share nothing with the trainer but "
        f"the store {settings.store} and a socket",
        highlight=False,
    )
    narrator = Narrator(console, settings.steps, "optimizer steps")
    with narrator.progress:
        Run(settings, None if options.no_kill else settings.steps // 2, narrator).execute()
    summary = summarise(folder)
    console.print(table(summary))
    for fact in facts(summary):
        console.print(f"• {fact}", highlight=False)
    report = write_report(folder, settings, summary)
    console.print(f"report: {report}", highlight=False)
    if not summary.verified:
        console.print("[bold red]NOT VERIFIED[/]: some version was held by no worker, or not bit for bit; see the table")
        return 1
    console.print(
        "[bold green]VERIFIED[/]: every version, state digest and SHA-256 over all BF16 bytes equal on the trainer and its workers"
    )
    return 0


def _exact(options: argparse.Namespace, model: str, console: Console) -> int:
    folder = fresh_folder(options.run or Path("runs/exact"))
    return compare(_settings(options, model, folder, EXACT_STEPS), console)


if __name__ == "__main__":
    sys.exit(main())
