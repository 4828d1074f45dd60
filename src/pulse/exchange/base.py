"""How ranks meet: bytes in, bytes out.

The trainers of one run are its ranks, 0 to size - 1. Each holds an `Exchange`, and all make the same calls in the same order, one
thread per rank; a call names itself by a tag such as `00000012/propose`. What an implementation promises:

* Messages come back in rank order, whatever the order of arrival. They may differ in length and be empty; nothing is padded.
* Ranks that make different calls learn it, all that wait for each other, from an `ExchangeError` that names both calls. They never
  get each other's bytes under a wrong tag, and never hang.
* A rank that does not come within `timeout` seconds, or whose process is gone, is named by a `RankMissing` on all that wait for it.
* A rank that comes back as another process (where that is possible: in memory, and through a store) ends the attempt of the others
  with `Regrouped`. A call for which every rank has posted its message is complete all the same, however late the others read it. So
  if one rank of the old group has completed a call, the others can: a vote that ends a round is taken by all of them or by none.
  A rank that runs out of time has no part in that: it goes, and the others may complete the call without it.
* After `Regrouped` the next call begins afresh, among the ranks as they are now. After any other failure the exchange refuses
  further calls: it cannot know what the others hold. Make another one, as a restarted process would.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from pulse.errors import ExchangeError, RankMissing, Regrouped

_TAG = re.compile(r"[A-Za-z0-9._/:-]{1,96}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank has put on and taken off the wire so far: messages to others, and whatever the exchange adds to them."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


class Exchange(Protocol):
    """One rank's place among `size` ranks. See the module for what every implementation promises."""

    rank: int
    size: int
    traffic: Traffic

    def all_gather(self, tag: str, data: bytes | memoryview) -> list[bytes]:
        """Every rank's bytes in rank order, this one's own included. `data` is copied. Raises `ExchangeError`."""

    def route(self, tag: str, outgoing: Mapping[int, bytes], sources: Collection[int]) -> dict[int, bytes]:
        """Send outgoing[r] to each rank r; what each rank of `sources` sent here, by rank, ascending.

        Every rank makes the call, also one that has nothing to send or to receive, and `sources` are exactly the ranks that send
        here. A message to itself is handed over without the wire. Raises `ExchangeError`.
        """

    def close(self) -> None:
        """Leave. Further calls are refused."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one rank: its number in the group, what it is, its messages (one for all, or one for each), and whom it awaits."""

    number: int
    name: str
    outgoing: bytes | Mapping[int, bytes]
    sources: tuple[int, ...]

    def to(self, rank: int) -> bytes | None:
        """The message for a rank, if there is one."""
        return self.outgoing if isinstance(self.outgoing, bytes) else self.outgoing.get(rank)


class BaseExchange(ABC):
    """What every exchange does alike: it checks calls, numbers them, hands a rank its own message, and stops after a failure."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        if type(rank) is not int or type(size) is not int:
            raise TypeError(f"rank={rank!r}, size={size!r}: whole numbers are wanted")
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}; ranks count from 0")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: a number of seconds is wanted")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.traffic = Traffic()
        self._number = 0  # of the next call, since the group began
        self._over = ""  # why there are no more calls

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def all_gather(self, tag: str, data: bytes | memoryview) -> list[bytes]:
        """See `Exchange.all_gather`."""
        mine = _copied(data)
        found = self._call("all_gather", tag, mine, self.others) | {self.rank: mine}
        return [found[rank] for rank in range(self.size)]

    def route(self, tag: str, outgoing: Mapping[int, bytes], sources: Collection[int]) -> dict[int, bytes]:
        """See `Exchange.route`."""
        messages, awaited = {rank: _copied(data) for rank, data in outgoing.items()}, set(sources)
        if strangers := sorted((messages.keys() | awaited) - set(range(self.size))):
            raise ValueError(f"there is no rank {strangers[0]} among {self.size}")
        if (self.rank in messages) != (self.rank in awaited):
            raise ValueError(f"rank {self.rank} must be in both outgoing and sources to hand itself a message, or in neither")
        mine = {self.rank: messages.pop(self.rank)} if self.rank in awaited else {}
        found = self._call("route", tag, messages, tuple(sorted(awaited - {self.rank}))) | mine
        return {rank: found[rank] for rank in sorted(awaited)}

    def close(self) -> None:
        """See `Exchange.close`."""
        self._over = "it was closed"

    @abstractmethod
    def _meet(self, call: Call) -> dict[int, bytes]:
        """Post the call's messages to other ranks; the messages of its sources. There are other ranks."""

    def _call(self, kind: str, tag: str, outgoing: bytes | Mapping[int, bytes], sources: tuple[int, ...]) -> dict[int, bytes]:
        if not _TAG.fullmatch(tag):
            raise ValueError(f"{tag!r} is not a tag: 1 to 96 of A-Z a-z 0-9 . _ / : -")
        call = Call(self._number, f"{kind} {tag!r}", outgoing, sources)
        if self._over:
            raise ExchangeError(f"rank {self.rank} cannot take part in {call.name}: {self._over}. Make another exchange")
        if self.size == 1:
            return {}
        self._over = f"{call.name} had failed"  # whatever ends it, an interrupt included
        try:
            found = self._meet(call)
        except Regrouped:
            self._over, self._number = "", 0
            raise
        self._over, self._number = "", self._number + 1
        return found

    def _count(self, *, sent: int = 0, received: int = 0) -> None:
        self.traffic += Traffic(sent, received)

    def _must_be_same(self, call: Call, rank: int, name: str, number: int | None = None) -> None:
        """Raise `ExchangeError` unless another rank's call is this rank's."""
        if name != call.name or number not in {None, call.number}:
            raise ExchangeError(
                f"rank {rank} is at {name}, rank {self.rank} at {call.name}"
                + ("" if number in {None, call.number} else f" (calls {number} and {call.number} of their groups)")
                + ": all ranks must make the same calls in the same order"
            )

    def _missing(self, call: Call, missing: Collection[int], waited: float, verb: str = "did not come to") -> RankMissing:
        ranks = tuple(sorted(missing))
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        return RankMissing(f"{names} {verb} {call.name} of rank {self.rank}, which waited {waited:.1f} s: restart what is gone", ranks)


def _copied(data: bytes | memoryview) -> bytes:
    return data if type(data) is bytes else memoryview(data).tobytes()
