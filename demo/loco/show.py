"""What a run with several trainers prints: a line per round while it runs, the table and the claims at the end."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.events import Event
from demo.loco.settings import Settings
from demo.loco.summary import Row, Summary, TrainerBack, row_of
from demo.show import caught_up, size, way
from pulse.economics import rate


class Narrator:
    """Tells a run's events, with a progress bar where the output is a terminal."""

    def __init__(self, console: Console, settings: Settings) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._settings = settings
        self._task = self.progress.add_task("inner steps of all trainers", total=settings.rounds * settings.inner_steps * settings.trainers)
        self._console = console
        self._of: dict[str, list[Event]] = defaultdict(list)
        self._told = -1  # the newest version told of
        self._again: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Say what is worth saying."""
        kind, who = event["event"], event["who"]
        self._of[kind].append(event)
        if kind == "step":
            self.progress.update(self._task, completed=len({(one["rank"], one["step"]) for one in self._of["step"]}))
        elif kind == "killed":
            self._say(f"[red]killed {event['worker']}[/], which held version {event['version']} (SIGKILL)")
        elif kind == "restarted":
            self._again.add(event["worker"])
            self._say(f"[green]started {event['worker']}[/] in place of {event['lost']}, with no weights at all")
        elif kind == "applied" and who in self._again:
            self._again.discard(who)
            self._say(f"[green]{who} caught up[/] to version {event['version']} by {way(event)}")
        elif kind == "killed-trainer":
            steps = f"after {event['step']} of {self._settings.inner_steps} steps of its window {event['window']}"
            self._say(f"[red]killed {event['trainer']}[/] {steps} (SIGKILL)")
        elif kind == "restarted-trainer":
            self._say(f"[green]started {event['trainer']}[/] in place of {event['lost']}, with the state it had saved after its last round")
        elif kind == "met" and who.endswith("-again"):
            self._say(f"[green]{who} met the others[/] after round {event['round']}, and takes its window from the beginning")
        elif kind in {"round", "published"}:
            self._tell_rounds()

    def _tell_rounds(self) -> None:
        """Say what can be said of rounds, in order: when all trainers have reported one, and its version is published."""
        for published in self._of["published"]:
            number = published["version"]
            said = {event["rank"]: event for event in self._of["round"] if event["round"] == number}
            if number != self._told + 1 or (number and len(said) < self._settings.trainers):
                continue
            self._told = number
            if number == 0:
                self._say(f"version 0: an anchor of {size(published['nbytes'])}; {self._settings.rounds} rounds to go")
            else:
                self._say(
                    _line(row_of(self._settings, [said[rank] for rank in sorted(said)], published, self._of), self._settings.trainers)
                )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


def _line(row: Row, trainers: int) -> str:
    equal = f"[green]equal on all {trainers}[/]" if row.equal(trainers) else "[bold red]NOT EQUAL[/]"
    return (
        f"round {row.round:>2}   reward {_rewards(row)}   {row.share_sent:.2%} sent: {size(round(row.payload))} per trainer, "
        f"{row.under_dense:.3g}x under dense   view changed {row.view_changed / row.elements:.2%}: patch of {size(row.patch_bytes)}   "
        f"anchor {row.digests[0][:8]} {equal}"
    )


def _rewards(row: Row) -> str:
    return " ".join("-" if value is None else f"{value:.2f}" for value in row.rewards)


HEADS = (
    "round", "reward", "sent %", "payload MB", "x dense FP32", "x DDP FP32", "x DDP BF16", "union %", "view %", "patch MB", "stale",
    "encode s", "exchange s", "commit s", "wait s", "anchor", "equal", "workers",
)  # fmt: skip


def cells(row: Row, trainers: int) -> list[str]:
    """A row as text, in the order of `HEADS`."""
    return [
        str(row.round),
        _rewards(row),
        f"{100 * row.share_sent:.2f}",
        " ".join(f"{nbytes / 1e6:.3g}" for nbytes in row.payload_bytes),
        f"{row.under_dense:.1f}",
        f"{row.under_ddp(4):.0f}",
        f"{row.under_ddp(2):.0f}",
        f"{100 * row.union / row.elements:.2f}",
        f"{100 * row.view_changed / row.elements:.2f}",
        f"{row.patch_bytes / 1e6:.3g}",
        str(row.stale),
        f"{row.seconds['encode']:.2f}",
        f"{row.seconds['exchange']:.2f}",
        f"{row.seconds['decode'] + row.seconds['commit']:.2f}",
        f"{row.seconds['wait']:.1f}",
        row.digests[0][:8],
        "yes" if row.equal(trainers) else "NO",
        f"{'yes' if row.verified else 'NO'} {row.agreeing}/{row.holders}",
    ]


def table(summary: Summary) -> Table:
    """Per round."""
    result = Table(title="Every round", title_justify="left", header_style="bold")
    for head in HEADS:
        result.add_column(head, justify="right")
    for row in summary.rows:
        good = row.verified and row.equal(summary.settings.trainers)
        result.add_row(*cells(row, summary.settings.trainers), style=None if good else "bold red")
    return result


def facts(summary: Summary) -> list[str]:
    """The run in sentences."""
    settings, rows = summary.settings, summary.rows
    lines = [caught_up(catch_up) for catch_up, _ in summary.catch_ups] + [came_back(back) for back in summary.trainers_back]
    if rows:
        payload, patch = sum(row.payload for row in rows) / len(rows), sum(row.patch_bytes for row in rows) / len(rows)
        wire = sum(sum(row.wire_bytes) for row in rows) / len(rows) / settings.trainers
        entries = sum(sum(row.sent) for row in rows) / sum(len(row.sent) for row in rows)
        dense, smaller = size(4 * rows[0].elements), rows[0].model_bytes / patch
        lines.append(
            f"a payload was {size(round(payload))} on average, {payload / max(entries, 1):.2f} B per entry; dense FP32 is {dense}; "
            f"up and down the wire, {size(round(wire))} per trainer and round"
        )
        lines.append(f"the patch to the workers was {size(round(patch))} on average, {smaller:.0f} times smaller than the BF16 model")
    memory = ", ".join(f"{who} {peak / 2**30:.1f}" for who, peak in sorted(summary.peak_memory.items()))
    shares = ", ".join(f"{who} {count}" for who, count in sorted(summary.rollouts.items()))
    link = "" if settings.link is None else f"; every trainer behind a link of {rate(settings.link)}"
    why = f"BF16 against autocast, and local weights up to {settings.inner_steps - 1} inner steps ahead"
    lines += [
        f"rollouts, in groups: {shares}; requests of lost workers that another one computed: {summary.requeued}",
        f"worker and trainer disagree by {summary.mismatch:.3f} nats per sampled token: {why}",
        f"{summary.seconds:.0f} s{link}; saving a trainer's state took at most {summary.save_seconds:.1f} s; peak memory in GiB: {memory}",
    ]
    return lines


def came_back(back: TrainerBack) -> str:
    """A sentence about a trainer that came back."""
    end = "took part in no round" if back.seconds_to_round is None else f"ended its window after {back.seconds_to_round:.1f} s"
    return (
        f"{back.trainer} came back from a kill in step {back.step + 1} of window {back.window}: it met the others at round {back.round} "
        f"after {back.seconds_to_meet:.1f} s, and {end}"
    )
