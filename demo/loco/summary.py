"""A run's events, put together: one row per round, and what is claimed of all of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from demo.events import Event
from demo.loco.settings import Settings
from demo.summary import CatchUp, by_kind, catch_up_of, rollouts_by_worker, verdict

PHASES = {"encode": ("encode",), "wait": ("meet",), "exchange": ("exchange", "vote", "proof"), "decode": ("decode",), "commit": ("commit",)}


@dataclass(frozen=True)
class Row:
    """One round. What is given per trainer is in rank order, of those that said so; `seconds` are the slowest trainer's.

    stale: inner steps that the local weights were ahead of those that rollouts came from, at most; digests: of the anchor, one per trainer
    that took part; holders, agreeing: workers that hashed the version, and those that found the trainer's bits.
    """

    round: int
    inner_steps: int
    elements: int
    rewards: tuple[float | None, ...]
    sent: tuple[int, ...]
    payload_bytes: tuple[int, ...]
    wire_bytes: tuple[int, ...]
    union: int
    view_changed: int
    patch_changed: int
    patch_bytes: int
    model_bytes: int
    stale: int
    seconds: dict[str, float]
    feedback_norms: tuple[float, ...]
    ages: tuple[float, ...]
    oldest: int
    digests: tuple[str, ...]
    holders: int
    agreeing: int

    @property
    def share_sent(self) -> float:
        """The share of the pseudo-gradient's entries that a trainer sent, on average."""
        return sum(self.sent) / len(self.sent) / self.elements

    @property
    def payload(self) -> float:
        """Bytes that a trainer sent as its payload, on average."""
        return sum(self.payload_bytes) / len(self.payload_bytes)

    @property
    def under_dense(self) -> float:
        """How many times smaller that is than FP32 pseudo-gradients, four bytes for each parameter."""
        return 4 * self.elements / self.payload

    def under_ddp(self, width: int) -> float:
        """How many times smaller it is than gradients of `width` bytes per parameter, exchanged at each of the window's steps."""
        return self.inner_steps * width * self.elements / self.payload

    def equal(self, trainers: int) -> bool:
        """Whether all trainers have the same anchor."""
        return len(self.digests) == trainers and len(set(self.digests)) == 1

    @property
    def verified(self) -> bool:
        """Whether the workers that held the version held the trainer's bits, and one did hold it."""
        return self.holders > 0 and self.holders == self.agreeing


@dataclass(frozen=True)
class TrainerBack:
    """A trainer that was killed in a window (counted from 1), after so many of its steps, and came back at a round."""

    trainer: str
    window: int
    step: int
    round: int
    newest: bool
    seconds_to_meet: float
    seconds_to_round: float | None


@dataclass(frozen=True)
class Summary:
    """A whole run. start: the verdict on version 0, which is no round's, and what its anchor weighed."""

    settings: Settings
    rows: list[Row]
    start: tuple[int, int]
    anchor_bytes: int
    catch_ups: list[tuple[CatchUp, bool]]
    trainers_back: list[TrainerBack]
    requeued: int
    peak_memory: dict[str, int]
    seconds: float
    rollouts: dict[str, int]
    mismatch: float
    save_seconds: float

    @property
    def claims(self) -> list[tuple[str, bool]]:
        """What every run must show, and whether this one did."""
        rows, trainers = self.rows, self.settings.trainers
        said = [
            (
                f"after each of {self.settings.rounds} rounds the state digest of the FP32 anchor is the same on all {trainers} trainers",
                [row.round for row in rows] == list(range(1, self.settings.rounds + 1)) and all(row.equal(trainers) for row in rows),
            ),
            (
                f"each of {len(rows) + 1} versions was held by workers, with the trainer's state digest and SHA-256 over all BF16 bytes",
                self.start[0] == self.start[1] > 0 and all(row.verified for row in rows),
            ),
            (
                "each patch holds exactly the weights whose view the outer step changed",
                all(row.patch_changed == row.view_changed for row in rows),
            ),
        ]
        for catch_up, newest in self.catch_ups:
            said.append((f"{catch_up.worker} was killed, and came back at the newest version, {catch_up.version}", newest))
        for back in self.trainers_back:
            there = back.newest and back.seconds_to_round is not None
            said.append((f"{back.trainer} was killed, and came back at the newest round, {back.round}, with its error feedback", there))
        return said

    @property
    def verified(self) -> bool:
        """Whether everything claimed is so."""
        return bool(self.rows) and all(holds for _, holds in self.claims)


def summarise(settings: Settings) -> Summary:
    """Read a run's events."""
    of, seconds = by_kind(settings.folder)
    published = {event["version"]: event for event in of["published"]}
    rounds = _rounds(of)
    steps = of["step"]
    return Summary(
        settings=settings,
        rows=[row_of(settings, said, published[number], of) for number, said in sorted(rounds.items()) if number in published],
        start=verdict(published[0], of),
        anchor_bytes=published[0]["nbytes"],
        catch_ups=[(catch_up_of(restarted, of), _was_newest(restarted["worker"], of)) for restarted in of["restarted"]],
        trainers_back=[_trainer_back(restarted, of) for restarted in of["restarted-trainer"]],
        requeued=sum(event["request"] is not None for event in of["lost"]),
        peak_memory={event["who"]: event["peak_memory"] for event in of["done"]},
        seconds=seconds,
        rollouts=rollouts_by_worker(of["answered"]),
        mismatch=sum(event["mismatch"] for event in steps) / max(len(steps), 1),
        save_seconds=max((event["seconds"] for event in of["saved"]), default=0.0),
    )


def _rounds(of: dict[str, list[Event]]) -> dict[int, list[Event]]:
    """What the trainers said of each round, in rank order; of a trainer that said it twice, the last."""
    found: dict[int, dict[int, Event]] = defaultdict(dict)
    for event in of["round"]:
        found[event["round"]][event["rank"]] = event
    return {number: [said[rank] for rank in sorted(said)] for number, said in found.items()}


def row_of(settings: Settings, said: list[Event], published: Event, of: dict[str, list[Event]]) -> Row:
    """One round, from what each trainer said of it and what was published after it."""
    number, first = published["version"], said[0]
    answered = [event for event in of["answered"] if event["version"] == number - 1]
    holders, agreeing = verdict(published, of)
    return Row(
        round=number,
        inner_steps=max(event["inner_steps"] for event in said),
        elements=first["elements"],
        rewards=tuple(_reward(answered, event["rank"]) for event in said),
        sent=tuple(event["sent"] for event in said),
        payload_bytes=tuple(first["payload_bytes"]),
        wire_bytes=tuple(event["wire_sent"] + event["wire_received"] for event in said),
        union=first["union"],
        view_changed=first["view_changed"],
        patch_changed=published["changed"],
        patch_bytes=published["nbytes"],
        model_bytes=published["full_nbytes"],
        stale=max((_ahead(event, settings.inner_steps) for event in answered), default=0),
        seconds=_seconds(said) | {"publish": published["seconds"]},
        feedback_norms=tuple(event["feedback_norm"] for event in said),
        ages=tuple(event["age_mean"] for event in said),
        oldest=max(event["age_max"] for event in said),
        digests=tuple(event["digest"] for event in said),
        holders=holders,
        agreeing=agreeing,
    )


def _ahead(answered: Event, inner_steps: int) -> int:
    """How many inner steps local weights were ahead of those that the oldest rollout of a step came from."""
    return int(answered["step"] - (answered["version"] - answered["staleness"]) * inner_steps)


def _reward(answered: list[Event], rank: int) -> float | None:
    """A trainer's mean reward in a window; of a step that it took twice, the last."""
    by_step = {event["step"]: event["reward"] for event in answered if event["rank"] == rank}
    return sum(by_step.values()) / len(by_step) if by_step else None


def _seconds(said: list[Event]) -> dict[str, float]:
    """Seconds of each phase, on the trainer where it took longest."""
    rows = [event["seconds"] for event in said]
    return {phase: max(sum(row.get(part, 0.0) for part in parts) for row in rows) for phase, parts in PHASES.items()}


def _was_newest(worker: str, of: dict[str, list[Event]]) -> bool:
    """Whether the first version that a worker applied was the newest when it looked, which was after it was started."""
    started = next(event["at"] for event in of["started"] if event["who"] == worker)
    first = next(event for event in of["applied"] if event["who"] == worker)
    before = [event["version"] for event in of["published"] if event["at"] <= started]
    return bool(before) and int(first["version"]) >= max(before)


def _trainer_back(restarted: Event, of: dict[str, list[Event]]) -> TrainerBack:
    name = restarted["trainer"]
    killed = next(event for event in of["killed-trainer"] if event["trainer"] == restarted["lost"])
    met = next(event for event in of["met"] if event["who"] == name)
    others = [event for event in of["round"] if event["who"] != name and event["at"] < met["at"]]
    newest = max((event["round"] for event in others), default=0)
    digests = {event["digest"] for event in others + of["met"] if event["round"] == newest}
    rounds = [event for event in of["round"] if event["who"] == name]
    return TrainerBack(
        trainer=name,
        window=killed["window"],
        step=killed["step"],
        round=met["round"],
        newest=met["round"] == newest and digests == {met["digest"]} and not any(event["resynced"] for event in rounds),
        seconds_to_meet=met["at"] - restarted["at"],
        seconds_to_round=min((event["at"] - restarted["at"] for event in rounds), default=None),
    )
