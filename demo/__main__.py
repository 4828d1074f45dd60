"""``python -m demo``: the main job, end to end. ``--exact`` compares patches with whole checkpoints instead."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from demo.exact import compare
from demo.model import DEFAULT_MODEL
from demo.report import write_report
from demo.run import Run, RunError, fresh_folder
from demo.settings import Settings
from demo.show import Narrator, facts, table
from demo.summary import summarise

EXACT_STEPS = 4


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and say what came out: 0 if everything was verified, 1 if not, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
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
    parser.add_argument("--steps", type=_positive, help="optimizer steps (default: 20; with --exact 4)")
    parser.add_argument("--workers", type=_positive, default=2, help="inference workers (default: %(default)s)")
    parser.add_argument("--store", help="where versions travel: a folder or a URL (default: a folder in the run's folder)")
    parser.add_argument("--seed", type=_seed, default=0, help="everything follows from it (default: %(default)s)")
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


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Treat a request to end as ^C, so that everything started is ended."""
    raise KeyboardInterrupt


def _seed(text: str) -> int:
    if not 0 <= (value := int(text)) < 1 << 32:
        raise argparse.ArgumentTypeError("must be from 0 to 4294967295")
    return value


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def prepared(model: str, console: Console) -> str:
    """The model's directory, made ready by a process of its own."""
    with console.status(f"preparing {model} …"):
        command = [sys.executable, "-m", "demo.model", model]
        done = subprocess.run(  # noqa: S603  our own module
            command, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent, check=False
        )
    if done.returncode != 0:
        raise RunError(done.stderr.strip().splitlines()[-1].removeprefix("error: ") if done.stderr.strip() else "no model")
    return done.stdout.strip().splitlines()[-1]


def _settings(options: argparse.Namespace, model: str, folder: Path, steps: int) -> Settings:
    store = options.store or str(folder / "store")
    if store.startswith("memory:"):
        raise RunError("a store in memory is seen by one process only: give a folder or a URL with --store")
    samples = Settings.samples_per_prompt
    return Settings(
        run=str(folder),
        model=model,
        store=store if "://" in store else str(Path(store).resolve()),
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
