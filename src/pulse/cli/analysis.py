"""`pulse analyze` and `pulse plan`: what training changes, and what it takes to send it."""

from __future__ import annotations

import math
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulse.cli.console import Json, emit, progress, reported
from pulse.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulse.analysis.plan import Step
    from pulse.analysis.sequences import History
    from pulse.analysis.tables import Table

Sources = Annotated[
    list[str],
    typer.Argument(metavar="CKPT… | STORE", help="Checkpoints in order, or one store.", show_default=False),
]
From = Annotated[int | None, typer.Option("--from", min=0, metavar="VERSION", help="The first version of a store.")]
To = Annotated[int | None, typer.Option("--to", min=0, metavar="VERSION", help="The last version of a store.")]
LearningRate = Annotated[float | None, typer.Option("--lr", min=0, help="A learning rate, for the |w| below which its steps are visible.")]


@reported
def analyze(
    sources: Sources,
    first: From = None,
    last: To = None,
    lr: LearningRate = None,
    views: Annotated[bool, typer.Option("--views", help="Also what changes in views of lower precision: BF16, F16, FP8.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List every tensor too.")] = False,
    as_json: Json = False,
) -> None:
    """What each step changed: shares, sizes, directions, by layer and magnitude. Exact, and in bounded memory."""
    import json

    from pulse import files
    from pulse.analysis import count, figures, page, tables

    _must_be_finite("--lr", lr)
    if html is not None and html.exists() and not _is_page(html):
        raise FileError(f"{html} exists and is no page; it is not overwritten")
    history = open_history(sources, first, last)
    with progress("analysing", as_json=as_json) as report:
        found = figures(count(history, views=views, report=report), lr)
    title = _title(sources, history)
    if html is not None:
        files.write_file(html, page.page(title, found).encode())
    if as_json:
        print(json.dumps({"sources": sources, **found, "html": None if html is None else str(html)}, indent=2))
        return
    shown = tables.tables(found) + ([tables.tensor_table(found)] if every else [])
    show([title, *tables.overview(found)], shown)
    if html is not None:
        print(f"plots: {html}")


def _is_page(path: Path) -> bool:
    """Whether a file starts as the pages do that analyze writes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(9).lower() == b"<!doctype"


def _must_be_finite(option: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to calculate with", param_hint=option)


@reported
def plan(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="[CKPT… | STORE]", help="Weights, or a trace of two or more.", show_default=False)
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Expect the density from one checkpoint and this learning rate.")] = None,
    density: Annotated[
        float | None, typer.Option(min=0, max=1, help="The share that changes; with a checkpoint, calibrates its classes.")
    ] = None,
    params: Annotated[float | None, typer.Option(min=1, help="Weights, as 7.6e9, instead of a checkpoint; needs --density.")] = None,
    width: Annotated[int, typer.Option(min=1, max=8, help="Bytes per weight, with --params.")] = 2,
    link: Annotated[str | None, typer.Option(help="Links, as 100Mbit,1Gbit (default: 10 Mbit/s to 100 Gbit/s).")] = None,
    interval: Annotated[float | None, typer.Option(min=0.001, help="Seconds of training between two steps.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Receivers that share the link.")] = 1,
    cores: Annotated[int, typer.Option(min=1, help="Cores that share the work on either side.")] = 1,
    first: From = None,
    last: To = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the speeds of this machine instead of the documented ones.")] = False,
    as_json: Json = False,
) -> None:
    """What a step will weigh in every encoding, how long it takes on a link, and on which links which encoding is the fastest."""
    from pulse.analysis import plan as planning
    from pulse.analysis import planned
    from pulse.economics import SPEEDS

    for option, value in (("--lr", lr), ("--density", density), ("--params", params), ("--interval", interval)):
        _must_be_finite(option, value)
    links = planning.LINKS if link is None else tuple(map(_link, link.split(",")))
    step = _step(sources or [], lr, density, params, width, first, last)
    speeds = {name: each.on(cores) for name, each in (planning.measured_speeds() if measure else SPEEDS).items()}
    placed = [planning.on_link(step, each, interval=interval, workers=workers, speeds=speeds) for each in links]
    if as_json:
        emit(planned.as_json(step, placed, workers, interval, speeds), [], as_json=True)
        return
    show(planned.lines(step, workers, speeds), planned.tables(step, placed, workers))


def _link(text: str) -> float:
    """A link in bit/s; a usage error if it is none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(?:bits?|bps)?(?:/s)?\s*", text)
    if found is None or float(found[1]) == 0:
        raise typer.BadParameter(f"{text!r} is no link; write 100Mbit, 1Gbit, 2.5Gbit", param_hint="--link")
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[found[2].lower()]


def _step(
    sources: list[str], lr: float | None, density: float | None, params: float | None, width: int, first: int | None, last: int | None
) -> Step:
    """What the user knows, as a step."""
    from pulse.analysis import count
    from pulse.analysis import plan as planning

    if params is not None:
        if sources or density is None or (lr, first, last) != (None, None, None):
            raise typer.BadParameter("goes with --density, and without checkpoints, --lr, --from or --to", param_hint="--params")
        return planning.from_numbers(int(params), density, width)
    if not sources:
        raise typer.BadParameter("a checkpoint, a store, or --params with --density is wanted", param_hint="CKPT")
    if (len(sources) > 1 or is_store(sources[0])) and (lr, density) != (None, None):
        raise typer.BadParameter("the density of a trace or a store is measured: leave out --lr and --density", param_hint="--lr")
    if len(sources) == 1 and is_store(sources[0]):
        return planning.from_trace(_newest_part(sources[0], first, last))
    history = open_history(sources, first, last)
    if len(sources) > 1:
        return planning.from_trace(history)
    if lr is None and density is None:
        raise typer.BadParameter("one checkpoint needs --lr, or --density", param_hint="--lr")
    counts = count(history).by_dtype
    nbytes = sum(spec.nbytes for spec in history.specs.values())
    update = planning.UPDATE * lr if density is None and lr is not None else planning.calibrated(counts, density or 0.0)
    return planning.from_weights(counts, nbytes, update)


def _newest_part(source: str, first: int | None, last: int | None) -> History:
    """The last few steps of a store, unless the user says which."""
    from pulse.analysis import chain_of
    from pulse.cli.sources import store_version
    from pulse.versions import Versions

    store, newest = store_version(source)
    last = newest if last is None else last
    return chain_of(Versions(store), max(0, last - 4) if first is None else first, last)


def is_store(source: str) -> bool:
    """Whether a source without @VERSION is a store rather than a checkpoint."""
    from pulse.cli.sources import split_version

    return split_version(source)[1] is None and ("://" in source or (Path(source) / "manifests").is_dir())


def open_history(sources: Sequence[str], first: int | None, last: int | None) -> History:
    """What the user named, as a history."""
    from pulse.analysis import Checkpoints, chain_of
    from pulse.cli.sources import existing_store, read_weights
    from pulse.versions import Versions

    if len(sources) == 1 and is_store(sources[0]):
        return chain_of(Versions(existing_store(sources[0])), first, last)
    if first is not None or last is not None:
        raise FileError(f"{sources[0]}: --from and --to choose versions of one store; this is not one")
    if stores := [source for source in sources if is_store(source)]:
        raise FileError(f"{stores[0]}: a store among checkpoints; name a version of it, as {stores[0]}@VERSION")
    return Checkpoints([read_weights(source) for source in sources], labels_of(sources))


def labels_of(sources: Sequence[str]) -> list[str]:
    """What sources are called: their paths, without the folders that all of them share."""
    paths = [source.rstrip("/").split("/") for source in sources]
    levels = zip(*(path[:-1] for path in paths), strict=False) if len(paths) > 1 else ()
    shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
    return ["/".join(path[shared:]) for path in paths]


def _title(sources: Sequence[str], history: History) -> str:
    steps = len(history.labels) - 1
    what = f"{history.labels[0]} to {history.labels[-1]}" if steps else history.labels[0]
    return (f"{sources[0]}: {what}" if len(sources) == 1 and steps else what) + f", {steps} step{'s' if steps != 1 else ''}"


def show(lines: Sequence[str], shown: Sequence[Table]) -> None:
    """Lines, and tables side by side as far as the terminal is wide."""
    from rich.console import Console
    from rich.table import Table as Drawn

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=128, highlight=False)
    for i, line in enumerate(lines):
        console.print(("" if i == 0 else "  ") + line, markup=False, soft_wrap=True)
    rows: list[list[Any]] = []
    room = 0
    for table in shown:
        drawn = _drawn(table)
        width = console.measure(drawn).maximum + 4
        if width > room:
            rows.append([])
            room = console.width + 4
        rows[-1].append(drawn)
        room -= width
    for row in rows:
        grid = Drawn.grid(padding=(0, 4))
        grid.add_row(*row)
        console.print(grid)


def _drawn(table: Table) -> Any:
    from rich import box
    from rich.table import Table as Drawn

    made = Drawn(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, heading in enumerate(table.headings):
        made.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for row in table.rows:
        made.add_row(*row)
    made.min_width = len(table.title)
    return made
