"""The results as tables: in the terminal, as Markdown, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.rounds import RoundSpeeds
from bench.sizes import Sizes
from bench.speeds import MEMORY_LIMIT, TWO_THREADS_LIMIT, Speed, Speeds


@dataclass(frozen=True, slots=True)
class Results:
    """One run of the benchmark."""

    command: str
    machine: dict[str, str]
    sizes: tuple[Sizes, ...]
    speeds: Speeds | None
    loco: RoundSpeeds | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: a title, what one must know to read it, a header, rows. Columns but the first are numbers."""

    title: str
    notes: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[int] = frozenset()


def grids(results: Results) -> Iterator[Grid]:
    """Every table of the results, in order."""
    yield from map(size_grid, results.sizes)
    if results.speeds is not None:
        yield speed_grid(results.speeds)
    if results.loco is not None:
        yield round_grid(results.loco)


def size_grid(sizes: Sizes) -> Grid:
    """The sizes of one step."""
    notes = (
        f"{sizes.units:,} weights, median |w| {sizes.median:.3g}; lr {sizes.lr}; {sizes.regime}",
        f"{sizes.changed:,} changed ({sizes.density:.3%})",
    )
    header = "layout", "bytes", "B/change", "smaller", "/ paper", "/ ref."
    rows = tuple(
        (
            row.layout,
            f"{row.nbytes:,.0f}",
            f"{row.per_change:.3f}",
            f"{row.times_smaller:.1f}",
            f"{row.to_paper:.3f}",
            f"{row.to_reference:.3f}",
        )
        for row in sizes.rows
    )
    ours = frozenset(i for i, row in enumerate(sizes.rows) if row.kind == "ours")
    broken = [f"NOT EXACT: {row.layout}" for row in sizes.rows if row.exact is False]
    return Grid(f"Sizes: {sizes.step}", (*notes, *broken), header, rows, ours)


def speed_grid(speeds: Speeds) -> Grid:
    """The speeds on one step."""
    rate = speeds.nbytes / speeds.copy_seconds / 1e9
    first = (
        "first small step of a fresh process, every encoding, imports included: {compiled:.1f} s with kernels to compile, {cached:.1f} s "
    )
    notes = (
        f"{speeds.nbytes / 1e9:.2f} GB, {speeds.density:.2%} changed, {speeds.rounds} rounds; figures are the least / the median",
        f"in copies of the checkpoint; a copy took {speeds.copy_seconds:.3f} / {speeds.copy_median:.3f} s ({rate:.1f} GB/s at best)",
        f"wanted beside it: two threads {TWO_THREADS_LIMIT} times as fast as one; extra memory at most {MEMORY_LIMIT} of the checkpoint",
        (first + "from the cache; the second one {second:.3f} s").format(**speeds.first_use),
    )
    header = "job", "1 thread", "wanted", "2 threads", "gain", "seconds", "memory"
    by_job: dict[tuple[str, str | None], list[Speed]] = {}
    for row in speeds.rows:
        by_job.setdefault((row.job, row.encoding), []).append(row)
    return Grid(f"Speeds: {speeds.step}", notes, header, tuple(_speed_row(*pair) for pair in by_job.values()))


def _speed_row(one: Speed, two: Speed) -> tuple[str, ...]:
    """A job in one thread and in two."""
    return (
        " ".join(filter(None, (one.job, one.encoding))),
        f"{one.copies:.1f} / {one.copies_median:.1f}",
        "" if one.limit is None else f"{one.limit:g}",
        f"{two.copies:.1f} / {two.copies_median:.1f}",
        f"{two.times_one_thread:.2f}",
        f"{one.seconds_median:.2f}",
        "unknown" if one.extra_memory is None or two.extra_memory is None else f"{max(one.extra_memory, two.extra_memory):.2f}",
    )


def round_grid(loco: RoundSpeeds) -> Grid:
    """The speeds of one PULSELoCo round."""
    notes = (
        f"{loco.params:,} made-up FP32 weights, two ranks in memory, one rank's work; {loco.threads} threads; {loco.rounds} rounds",
        f"in copies of the FP32 weights, the least / the median; a copy took {loco.copy_seconds:.3f} s at best",
        "encode: gate and payload; decode: two payloads; commit: error feedback, mean, outer step, figures; state: bytes per parameter",
    )
    header = "method", "sent", "bytes", "B/entry", "encode", "decode", "commit", "state"
    rows = tuple(
        (
            row.method,
            f"{row.density:.2%}",
            f"{row.payload_bytes:,}",
            f"{row.per_entry:.3f}",
            *(f"{least:.1f} / {middle:.1f}" for least, middle in (row.encode, row.decode, row.commit)),
            f"{row.state:.1f}",
        )
        for row in loco.rows
    )
    return Grid("One PULSELoCo round", notes, header, rows, frozenset(i for i, row in enumerate(loco.rows) if "pulse" in row.method))


def show(console: Console, results: Results) -> None:
    """Every table, in the terminal."""
    for grid in grids(results):
        table = Table(title=grid.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for column, words in enumerate(grid.header):
            table.add_column(words, justify="right" if column else "left", no_wrap=True)
        for number, row in enumerate(grid.rows):
            table.add_row(*row, style="bold" if number in grid.bold else None)
        console.print(table, *grid.notes, sep="\n", highlight=False)


def markdown(results: Results) -> str:
    """The page with every table."""
    about = [f"* {key}: {value}" for key, value in results.machine.items()]
    pages = [f"# Benchmark, {results.machine['date']}\n\n`{results.command}`\n\n" + "\n".join(about)]
    for grid in grids(results):
        notes = "\n".join(f"* {note}" for note in grid.notes)
        rows = [tuple(f"**{cell}**" for cell in row) if i in grid.bold else row for i, row in enumerate(grid.rows)]
        lines = [_line(grid.header), _line(["---"] + ["---:"] * (len(grid.header) - 1)), *map(_line, rows)]
        pages.append(f"## {grid.title}\n\n{notes}\n\n" + "\n".join(lines))
    return "\n\n".join(pages) + "\n\nHow to read this: [docs/benchmarks.md](../../docs/benchmarks.md).\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write(folder: Path, name: str, results: Results) -> list[Path]:
    """NAME.md and NAME.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {".md": markdown(results), ".json": json.dumps(asdict(results), indent=1) + "\n"}
    for suffix, text in texts.items():
        (folder / f"{name}{suffix}").write_text(text)
    return [folder / f"{name}{suffix}" for suffix in texts]
