"""A run's events, put together: one row per version."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.events import Event, read_events


@dataclass(frozen=True)
class Row:
    """One version: what it learned, what it weighed, how long it took to arrive, and whether it arrived whole."""

    version: int
    step: int
    kind: str
    reward: float | None
    held_out: float | None
    changed_share: float
    nbytes: int
    ratio: float
    bytes_per_change: float
    publish_seconds: float
    fetch_seconds: float
    apply_seconds: float
    to_first_token: float | None
    staleness: int | None
    holders: int
    agreeing: int

    @property
    def verified(self) -> bool:
        """State digest and SHA-256 equal on the trainer and on every worker that held the version."""
        return self.holders > 0 and self.holders == self.agreeing


@dataclass(frozen=True)
class CatchUp:
    """A worker that was killed and came back."""

    worker: str
    held: int | None
    version: int
    kind: str
    patches: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """A whole run."""

    rows: list[Row]
    catch_ups: list[CatchUp]
    requeued: int
    peak_memory: dict[str, int]
    seconds: float
    rollouts: dict[str, int]
    mismatch: float

    @property
    def verified(self) -> bool:
        """Every version was held by a worker, and by each of them to the last bit."""
        return bool(self.rows) and all(row.verified for row in self.rows)


def summarise(folder: Path) -> Summary:
    """Read a run's events."""
    of, seconds = by_kind(folder)
    steps = of["step"]
    return Summary(
        rows=[_row(published, of) for published in of["published"]],
        catch_ups=[catch_up_of(restarted, of) for restarted in of["restarted"]],
        requeued=sum(event["request"] is not None for event in of["lost"]),
        peak_memory={event["who"]: event["peak_memory"] for event in of["done"]},
        seconds=seconds,
        rollouts=rollouts_by_worker(of["answered"]),
        mismatch=sum(event["mismatch"] for event in steps) / max(len(steps), 1),
    )


def by_kind(folder: Path) -> tuple[dict[str, list[Event]], float]:
    """A run's events in the order of their times, by kind; and how long it took."""
    events = list(read_events(folder / "events"))
    of: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        of[event["event"]].append(event)
    return of, events[-1]["at"] - events[0]["at"]


def rollouts_by_worker(answered: list[Event]) -> dict[str, int]:
    """How many groups of rollouts each worker has drawn."""
    counts: dict[str, int] = defaultdict(int)
    for event in answered:
        for worker, count in event["by_worker"].items():
            counts[worker] += count
    return dict(counts)


def _row(published: Event, of: dict[str, list[Event]]) -> Row:
    version = published["version"]
    answered = [event for event in of["answered"] if event["version"] == version]
    applied = [event for event in of["applied"] if event["version"] == version and event["base"] is not None]
    applied = applied or [event for event in of["applied"] if event["version"] == version]
    holders, agreeing = verdict(published, of)
    first = [event["to_first_token"] for event in answered if event["to_first_token"] is not None]
    return Row(
        version=version,
        step=published["step"],
        kind=published["kind"],
        reward=_of_split(answered, "train"),
        held_out=_of_split(answered, "held-out"),
        changed_share=published["changed"] / max(published["elements"], 1),
        nbytes=published["nbytes"],
        ratio=published["full_nbytes"] / max(published["nbytes"], 1),
        bytes_per_change=published["nbytes"] / max(published["changed"], 1),
        publish_seconds=published["seconds"],
        fetch_seconds=max((event["fetch_seconds"] for event in applied), default=0.0),
        apply_seconds=max((event["apply_seconds"] for event in applied), default=0.0),
        to_first_token=min(first, default=None),
        staleness=max((event["staleness"] for event in answered), default=None),
        holders=holders,
        agreeing=agreeing,
    )


def _of_split(answered: list[Event], split: str) -> float | None:
    return next((event["reward"] for event in answered if event["split"] == split), None)


def verdict(published: Event, of: dict[str, list[Event]]) -> tuple[int, int]:
    """How many workers hashed the version, and how many of them found what the trainer found."""
    version = published["version"]
    hashes = [event for event in of["hashed"] + of["finished"] if event["version"] == version]
    mine = {
        event["sha256"] for event in hashes if "digest" not in event
    }  # what the trainer says of itself: it has no need to read a digest
    found: dict[str, set[tuple[Any, Any]]] = defaultdict(set)
    for event in hashes:
        if "digest" in event:
            found[str(event.get("worker", event["who"]))].add((event["digest"], event["sha256"]))
    expected = {(published["digest"], sha256) for sha256 in mine}
    used = {digest for event in of["answered"] if event["version"] == version for digest in event["digests"]}
    honest = len(expected) == 1 and used <= {published["digest"]}
    return len(found), sum(honest and pairs == expected for pairs in found.values())


def catch_up_of(restarted: Event, of: dict[str, list[Event]]) -> CatchUp:
    """How a worker came back."""
    worker = restarted["worker"]
    killed = next(event for event in of["killed"] if event["worker"] == restarted["lost"])
    first = next(event for event in of["applied"] if event["who"] == worker)
    seconds = first["fetch_seconds"] + first["apply_seconds"]
    return CatchUp(worker, killed["version"], first["version"], first["kind"], first["patches"], seconds)
