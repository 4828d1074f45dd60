"""What the ranks decide together before a round: pure functions of what all of them said, so that all decide the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from pulse.canonical import fields, from_json, natural, optional, sha256_digits, state_digits, text, to_json, tuple_of
from pulse.errors import FormatError, RoundRefused, TornUpdate, WeightsMismatch


class Stand(Enum):
    """Where a rank stands in its window of inner steps."""

    INSIDE = "inside"  # it trains on, and comes back at the end of the window
    READY = "ready"  # the window is over
    GUEST = "guest"  # it has just taken over the others' anchor; it takes part in a round that is due, and else trains on
    DONE = "done"  # it has no more data; it takes part as long as the others go on


@dataclass(frozen=True)
class Word:
    """What a rank says at a meeting.

    digest: of the anchor as it was committed; whole: whether the anchor is that still; steps: inner steps since its last round; weight: in
    the mean; bad: a parameter whose pseudo-gradient is not finite; dropped: whether its window was given up for that; payloads: the
    SHA-256 of each payload that it would send; buffers: a digest of them, or empty.
    """

    layout: str
    settings: str
    round: int
    digest: str
    whole: bool
    stand: Stand
    steps: int
    weight: float
    bad: str | None = None
    dropped: bool = False
    payloads: tuple[str, ...] = ()
    buffers: str = ""

    def to_bytes(self) -> bytes:
        """As it travels."""
        return to_json({**asdict(self), "stand": self.stand.value})

    @classmethod
    def from_bytes(cls, data: bytes) -> Word:
        """The inverse; `FormatError` for anything else."""
        return cls(**fields(from_json(data, "a rank's word"), **_READERS))


@dataclass(frozen=True)
class Vote:
    """Whether a rank could read all that arrived, and how many bytes of payload it has sent. fault: why not, or empty."""

    nbytes: int
    fault: str = ""

    def to_bytes(self) -> bytes:
        """As it travels."""
        return to_json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Vote:
        """The inverse; `FormatError` for anything else."""
        return cls(**fields(from_json(data, "a rank's vote"), nbytes=natural, fault=text))


def _stand(value: object) -> Stand:
    if value not in {stand.value for stand in Stand}:
        raise FormatError("a rank stands nowhere that is known")
    return Stand(value)


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise FormatError("a truth is true or false")
    return value


def _weight(value: object) -> float:
    if not isinstance(value, float) or not is_weight(value):
        raise FormatError("a weight is a number above 0 and below 1e9")
    return value


def is_weight(value: float) -> bool:
    """Whether a rank may have this weight in the mean."""
    return 0 < value < 1e9


_READERS: dict[str, Callable[[object], Any]] = {
    "layout": state_digits,
    "settings": text,
    "round": natural,
    "digest": state_digits,
    "whole": _truth,
    "stand": _stand,
    "steps": natural,
    "weight": _weight,
    "bad": optional(text),
    "dropped": _truth,
    "payloads": tuple_of(sha256_digits),
    "buffers": text,
}


@dataclass(frozen=True)
class Resync:
    """These ranks take over the state of `source`."""

    source: int
    ranks: tuple[int, ...]


class Verdict(Enum):
    """What follows."""

    ROUND = "round"  # everyone exchanges
    WAIT = "wait"  # those whose window is not over train on, the others meet again
    OVER = "over"  # nobody has anything left


def check(words: Sequence[Word]) -> None:
    """Raise `WeightsMismatch` on every rank, naming the odd ones, unless all have one layout, one set of settings and equal buffers."""
    for what, values in (
        ("parameters (names, shapes, order, view)", [word.layout for word in words]),
        ("settings", [word.settings for word in words]),
        ("buffers", [word.buffers for word in words]),
    ):
        if odd := odd_ones(values):
            usual = next(value for rank, value in enumerate(values) if rank not in odd)
            ranks = ("rank " if len(odd) == 1 else "ranks ") + ", ".join(map(str, odd))
            raise WeightsMismatch(f"{ranks}: other {what} than the rest{_difference(usual, values[odd[0]])}")


def odd_ones(values: Sequence[str]) -> tuple[int, ...]:
    """The ranks whose value is not the one that most have, of equally many the lowest rank's."""
    usual = Counter(values).most_common(1)[0][0]  # the first of equals
    return tuple(rank for rank, value in enumerate(values) if value != usual)


def _difference(usual: str, other: str) -> str:
    """Which settings differ, if these are settings."""
    if not usual.startswith("{"):
        return ""
    common, odd = json.loads(usual), json.loads(other)
    differing = [key for key in sorted({*common, *odd}) if common.get(key) != odd.get(key)]
    return ": " + ", ".join(f"{key} {odd.get(key)!r} instead of {common.get(key)!r}" for key in differing)


def resync(words: Sequence[Word]) -> Resync | None:
    """Who must take over whose state.

    Right is the newest round; in it the anchor that most ranks have; of equally many the one whose rank has made most inner steps since,
    and then the lowest rank's. An anchor that is not what was committed is never right. Raises `TornUpdate` on every rank if all are so.
    """
    newest = max((word.round for word in words if word.whole), default=None)
    if newest is None:
        raise TornUpdate("no rank's anchor is what its last round made it: load a saved state, then go on")
    candidates = [rank for rank, word in enumerate(words) if word.whole and word.round == newest]
    votes = Counter(words[rank].digest for rank in candidates)
    source = max(candidates, key=lambda rank: (votes[words[rank].digest], words[rank].steps, -rank))
    right = (newest, words[source].digest, True)
    odd = tuple(rank for rank, word in enumerate(words) if (word.round, word.digest, word.whole) != right)
    return Resync(source, odd) if odd else None


def verdict(words: Sequence[Word]) -> Verdict:
    """What follows, once all have one anchor. Raises `RoundRefused` on every rank if a pseudo-gradient is not finite."""
    stands = {word.stand for word in words}
    if Stand.INSIDE in stands:
        return Verdict.WAIT
    bad = tuple(rank for rank, word in enumerate(words) if word.bad is not None)
    if bad:
        names = ", ".join(f"rank {rank}: {words[rank].bad}" for rank in bad)
        raise RoundRefused(
            f"a pseudo-gradient is not finite, or beyond 2^64 ({names}): nothing was sent, nothing has changed; "
            "rollback() there gives up the window, on_nonfinite='drop' does so by itself",
            bad,
        )
    if Stand.READY in stands or any(word.steps for word in words if word.stand is Stand.DONE):
        return Verdict.ROUND
    return Verdict.WAIT if Stand.GUEST in stands else Verdict.OVER


def trains_on(stand: Stand, words: Sequence[Word]) -> bool:
    """Whether a rank that stands there goes back to its inner steps when there is no round yet."""
    return stand is Stand.INSIDE or (stand is Stand.GUEST and all(word.stand is not Stand.READY for word in words))
