"""``python -m demo.loco``: several trainers, several workers, one store. Says what was proven; 1 if anything was not."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from demo.fleet import RunError
from demo.loco.link import rate_of
from demo.loco.report import write_report
from demo.loco.run import Kills, Run, kills_for
from demo.loco.settings import MOST_TRAINERS, SMALL, Settings
from demo.loco.show import Narrator, facts, table
from demo.loco.summary import summarise
from demo.model import DEFAULT_MODEL
from demo.options import interrupt, positive, prepared, seed, store_of
from demo.run import fresh_folder
from demo.task import MOST_TRAINED
from pulse.economics import rate
from pulse.torch import METHODS


def main(arguments: list[str] | None = None) -> int:
    """Run everything and say what came out: 0 if every claim holds, 1 if not, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, interrupt)
    console = Console(width=None if sys.stdout.isatty() else 210)
    try:
        module = "demo.loco.small" if options.model == SMALL else "demo.model"
        settings = _settings(options, prepared(options.model, console, module))
        return _run(settings, Kills() if options.no_kill else kills_for(settings), console)
    except RunError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every process has been ended")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo.loco", description=__doc__)
    add = parser.add_argument
    add("--method", choices=tuple(METHODS), default=Settings.method, help="how trainers share what they learn (default: %(default)s)")
    add("--trainers", type=_trainers, default=Settings.trainers, metavar="R", help="default: %(default)s")
    add("--inner-steps", type=positive, default=Settings.inner_steps, metavar="H", help="of each trainer in a round (default: %(default)s)")
    add("--workers", type=positive, default=Settings.workers, metavar="W", help="inference workers (default: %(default)s)")
    add("--rounds", type=positive, default=Settings.rounds, help="default: %(default)s")
    add("--link", type=rate_of, help="the rate of the link between each trainer and the store, such as 100mbit (default: what there is)")
    add("--model", default=DEFAULT_MODEL, help="directory, hub name, or `small`: one made on the spot (default: %(default)s)")
    add("--store", help="where trainers and workers meet: an empty folder or a URL (default: a folder in the run's folder)")
    add("--seed", type=seed, default=0, help="everything follows from it (default: %(default)s)")
    add("--run", type=Path, default=Path("runs/loco"), help="folder for the run's records (default: %(default)s)")
    add("--no-kill", action="store_true", help="do not kill a worker and a trainer half way")
    return parser


def _trainers(text: str) -> int:
    if (value := positive(text)) > MOST_TRAINERS:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_TRAINERS}: there are {MOST_TRAINED} sums to train on")
    return value


def _settings(options: argparse.Namespace, model: str) -> Settings:
    folder = fresh_folder(options.run)
    prompts = min(Settings.prompts_per_step, MOST_TRAINED // options.trainers)
    return Settings(
        run=str(folder),
        model=model,
        store=store_of(options.store, folder),
        method=options.method,
        trainers=options.trainers,
        inner_steps=options.inner_steps,
        workers=options.workers,
        rounds=options.rounds,
        steps=(options.rounds + 1) * options.inner_steps,
        link=options.link,
        seed=options.seed,
        prompts_per_step=prompts,
        micro_batch=Settings.samples_per_prompt * (2 if prompts % 2 == 0 else 1),
    )


def _run(settings: Settings, kills: Kills, console: Console) -> int:
    link = "" if settings.link is None else f", every trainer behind a link of {rate(settings.link)}"
    console.print(
        f"{settings.method} on {Path(settings.model).name}: {settings.trainers} trainers, {settings.rounds} rounds of "
        f"{settings.inner_steps} steps, {settings.workers} workers; all meet in {settings.store}{link}",
        highlight=False,
    )
    narrator = Narrator(console, settings)
    with narrator.progress:
        Run(settings, kills, narrator).execute()
    summary = summarise(settings)
    console.print(table(summary))
    for fact in facts(summary):
        console.print(f"• {fact}", highlight=False)
    for text, holds in summary.claims:
        console.print(f"{'[green]yes[/]' if holds else '[bold red]NO[/] '} {text}", highlight=False)
    console.print(f"report: {write_report(summary)}", highlight=False)
    console.print("[bold green]VERIFIED[/]" if summary.verified else "[bold red]NOT VERIFIED[/]")
    return 0 if summary.verified else 1


if __name__ == "__main__":
    sys.exit(main())
