"""With the same seed, a run that ships patches and a run that copies whole checkpoints learn the same, to the last bit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.events import read_events
from demo.run import Run, read_records
from demo.settings import Settings, SyncMode
from demo.show import Narrator

COMPARED = ("tokens", "log-probs", "rewards", "losses", "weights (BF16)", "masters (FP32)")


@dataclass(frozen=True)
class Trace:
    """What a run did at each step, in a form that shows every bit: name → step → text."""

    values: dict[str, dict[int, str]]
    nbytes: int


def compare(settings: Settings, console: Console) -> int:
    """Run both ways and compare; 0 if nothing differs, 1 if anything does."""
    traces = {sync: _traced(settings, sync, console) for sync in ("patch", "checkpoint")}
    patch, checkpoint = traces["patch"], traces["checkpoint"]
    steps = sorted(set().union(*(trace.values[name] for trace in traces.values() for name in COMPARED)))
    table = Table(title="Patches against whole checkpoints, bit for bit", title_justify="left", header_style="bold")
    table.add_column("step", justify="right")
    equal = True
    for name in COMPARED:
        table.add_column(name)
    for step in steps:
        pairs = [(patch.values[name].get(step), checkpoint.values[name].get(step)) for name in COMPARED]
        equal = equal and all(left == right for left, right in pairs)
        table.add_row(str(step), *(_cell(left, right) for left, right in pairs))
    console.print(table)
    console.print(f"sent: {patch.nbytes:,} bytes as patches and anchors, {checkpoint.nbytes:,} bytes as whole checkpoints", highlight=False)
    masters = len(patch.values["masters (FP32)"])
    if equal and masters == settings.steps:
        console.print(f"[bold green]EXACT[/]: {settings.steps} steps, nothing differs")
        return 0
    console.print("[bold red]NOT EXACT[/]: the two runs differ" if not equal else "[bold red]NOTHING TO COMPARE[/]: a run has no steps")
    return 1


def _cell(left: str | None, right: str | None) -> str:
    if left is None and right is None:
        return "-"
    return f"{left[:10]} =" if left is not None and left == right else f"[bold red]{str(left)[:10]} ≠ {str(right)[:10]}[/]"


def _traced(settings: Settings, sync: SyncMode, console: Console) -> Trace:
    """One run, whose settings differ from the other's only in how weights travel."""
    folder = settings.folder / sync
    folder.mkdir()
    store = str(folder / "store") if sync == "checkpoint" or Path(settings.store).parent == settings.folder else settings.store
    run = replace(settings, run=str(folder), store=store, sync=sync, record_masters=True, held_out=min(settings.held_out, 4))
    narrator = Narrator(console, settings.steps, f"by {sync}")
    console.print(f"[bold]{sync}[/]")
    with narrator.progress:
        Run(run, kill_at=None, show=narrator).execute()
    return trace(folder)


def trace(folder: Path) -> Trace:
    """Read a run's records."""
    values: dict[str, dict[int, str]] = {name: {} for name in COMPARED}
    records: dict[int, list[dict[str, Any]]] = {}
    for record in read_records(folder):
        records.setdefault(int(str(record["step"])), []).append(record)
    for step, rows in records.items():
        values["tokens"][step] = _digest([row["tokens"] for row in rows])
        values["log-probs"][step] = _digest([[value.hex() for value in values_] for row in rows for values_ in row["logprobs"]])
        values["rewards"][step] = _digest([row["rewards"] for row in rows])
    version_step: dict[int, int] = {}
    nbytes = 0
    for event in read_events(folder / "events"):
        if event["event"] == "published":
            version_step[event["version"]] = event["step"]
            nbytes += event["nbytes"]
        elif event["event"] == "step":
            values["losses"][event["step"]] = _digest([loss.hex() for loss in event["losses"]])
            values["masters (FP32)"][event["step"]] = event["masters"]
        elif event["event"] == "hashed" and event["who"] == "trainer":
            values["weights (BF16)"][version_step[event["version"]]] = event["sha256"]
    return Trace(values, nbytes)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
