"""What the demo prints: a line per step while it runs, the table at the end."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.events import Event
from demo.summary import CatchUp, Row, Summary


class Narrator:
    """Tells a run's events, with a progress bar where the output is a terminal."""

    def __init__(self, console: Console, steps: int, label: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.progress.add_task(label, total=steps)
        self._say = console.print
        self._published: Event | None = None
        self._again: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Say what is worth saying."""
        kind = event["event"]
        if kind == "published":
            self._published = event
            self.progress.update(self._task, completed=event["step"])
        elif kind == "answered":
            self._say(self._answered(event), highlight=False)
        elif kind == "lost":
            request = "no request" if event["request"] is None else f"request {event['request']}; another worker gets it"
            self._say(f"[yellow]the trainer lost {event['worker']} with {request}[/]", highlight=False)
        elif kind == "killed":
            self._say(f"[red]killed {event['worker']}[/], which held version {event['version']} (SIGKILL)", highlight=False)
        elif kind == "restarted":
            self._again.add(event["worker"])
            self._say(f"[green]started {event['worker']}[/] in place of {event['lost']}, with no weights at all", highlight=False)
        elif kind == "applied" and event["who"] in self._again:
            self._again.discard(event["who"])
            self._say(f"[green]{event['who']} caught up[/] to version {event['version']} by {way(event)}", highlight=False)

    def _answered(self, event: Event) -> str:
        sent = self._published
        assert sent is not None
        changed = f", {sent['changed'] / sent['elements']:.2%} changed" if sent["kind"] == "patch" else ""
        waited = "" if event["to_first_token"] is None else f"   first token after {event['to_first_token']:.1f} s"
        what = "reward" if event["split"] == "train" else "held-out accuracy"
        return (
            f"step {sent['step']:>2}   version {sent['version']:>2}   {sent['kind']} of {size(sent['nbytes'])}{changed}"
            f"{waited}   {what} {event['reward']:.2f}"
        )


def way(event: Event) -> str:
    """How a worker got where it is."""
    patches = f"{event['patches']} patch{'' if event['patches'] == 1 else 'es'}"
    if event["kind"] == "patch":
        return patches
    return f"an {event['kind']} and {patches}" if event["kind"] == "anchor" else f"a whole {event['kind']}"


def size(nbytes: int) -> str:
    """Bytes, as people read them."""
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 10_000 else f"{nbytes} B"


def caught_up(catch_up: CatchUp) -> str:
    """A sentence about a worker that came back."""
    by = way(vars(catch_up))
    return (
        f"{catch_up.worker} came back without weights and was at version {catch_up.version} in {catch_up.seconds:.1f} s by {by}; "
        f"it had held version {catch_up.held} when it was killed"
    )


HEADS = (
    "step", "version", "kind", "reward", "held-out", "changed %", "bytes", "times smaller", "B/change",
    "publish s", "fetch s", "apply s", "step → token s", "stale", "verified",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row as text, in the order of `HEADS`."""
    return [
        str(row.step),
        str(row.version),
        row.kind,
        _or_dash(row.reward, "{:.2f}"),
        _or_dash(row.held_out, "{:.2f}"),
        f"{row.changed_share:.2%}"[:-1],
        f"{row.nbytes:,}",
        f"{row.ratio:.1f}",
        f"{row.bytes_per_change:.2f}",
        f"{row.publish_seconds:.2f}",
        f"{row.fetch_seconds:.2f}",
        f"{row.apply_seconds:.3f}",
        _or_dash(row.to_first_token, "{:.2f}"),
        _or_dash(row.staleness, "{}"),
        f"{'yes' if row.verified else 'NO'} {row.agreeing}/{row.holders}",
    ]


def table(summary: Summary) -> Table:
    """Per version."""
    result = Table(title="Every version, from the optimizer step to the first token", title_justify="left", header_style="bold")
    for head in HEADS:
        result.add_column(head, justify="right", no_wrap=head != "step → token s")
    for row in summary.rows:
        result.add_row(*cells(row), style=None if row.verified else "bold red")
    return result


def facts(summary: Summary) -> list[str]:
    """The run in sentences."""
    held = [row.held_out for row in summary.rows if row.held_out is not None]
    memory = ", ".join(f"{who} {peak / 2**30:.1f}" for who, peak in sorted(summary.peak_memory.items()))
    patches = [row for row in summary.rows if row.kind == "patch"]
    lines = [f"held-out accuracy {held[0]:.2f} before, {held[-1]:.2f} after"] if len(held) > 1 else []
    if patches:
        mean = sum(row.nbytes for row in patches) / len(patches)
        full = patches[0].nbytes * patches[0].ratio
        lines.append(
            f"a patch was {size(round(mean))} on average, {full / mean:.0f} times smaller than the BF16 model ({size(round(full))})"
        )
    shares = ", ".join(f"{who} {count}" for who, count in sorted(summary.rollouts.items()))
    lines += [
        f"rollouts, in groups: {shares}; requests of lost workers that another one computed: {summary.requeued}",
        f"worker and trainer disagree by {summary.mismatch:.3f} nats per sampled token; the loss goes by what the workers recorded",
        f"{summary.seconds:.0f} s; peak memory in GiB: {memory}",
    ]
    return [caught_up(catch_up) for catch_up in summary.catch_ups] + lines


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
