"""What commands print: one screen for people, one JSON object for programs, and one line for what went wrong."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from pulse.errors import FormatError, PulseError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def emit(result: Mapping[str, Any], lines: Sequence[str], *, as_json: bool, stream: bool = False) -> None:
    """Print a result: as JSON (on one line if it is one of a stream of results), or as these lines."""
    if as_json:
        print(json.dumps(result, indent=None if stream else 2), flush=stream)
    else:
        print("\n".join(lines))


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose `PulseError`s are one clear line and exit code 1; a program gets them as JSON."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except PulseError as error:
            if kwargs.get("as_json"):
                print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=2))
            else:
                print(f"pulse: {type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        finally:
            _say_what_compiling_cost()

    return run


def _say_what_compiling_cost() -> None:
    """A first use that takes seconds longer than every later one is explained."""
    if (kernels := sys.modules.get("pulse.kernels")) is None or (seconds := kernels.compile_seconds()) < 1:
        return
    then = "later runs find them in the cache" if kernels.is_cached() else "there is no place to keep them: set NUMBA_CACHE_DIR to one"
    warn(f"{seconds:.0f} s of this went into compiling kernels; {then}")


@contextlib.contextmanager
def about(path: object) -> Iterator[None]:
    """Errors in the bytes of a file, with the file's name in front."""
    try:
        yield
    except FormatError as error:
        raise type(error)(f"{path}: {error}") from error


def warn(message: str) -> None:
    """Tell a person something that changes no result."""
    print(f"pulse: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(title: str, *, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """A callback for (bytes done, bytes in all) that draws a bar, if the output is a terminal and not for a program."""
    if as_json or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text: the first column to the left, numbers to the right."""
    cells = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def size(nbytes: float) -> str:
    """Bytes for people: `512 B`, `1.5 MB`. Decimal units, as networks and discs are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def percent(part: float, whole: float) -> str:
    """A share for people."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def factor(whole: float, part: float) -> str:
    """How many times smaller `part` is than `whole`."""
    return f"{whole / part:.3g}x" if part else "-"
