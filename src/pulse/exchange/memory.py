"""An exchange within one process, its ranks in threads: the twin that tests and simulations use in place of the others.

Nothing is framed: traffic counts what ranks would send to each other one by one, so `size - 1` times the message for an `all_gather`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Self

from pulse.errors import ExchangeError, Regrouped
from pulse.exchange.base import BaseExchange, Call

Epoch = tuple[int, ...]


@dataclass
class _Board:
    """What the ranks share. A rank's posts stand under its epoch (the incarnations of all ranks) and the number of the call."""

    incarnations: list[int]
    posts: dict[tuple[Epoch, int, int], Call] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


class MemoryExchange(BaseExchange):
    """One of the ranks that `group` makes."""

    def __init__(self, board: _Board, rank: int, timeout: float) -> None:
        super().__init__(rank, len(board.incarnations), timeout)
        self._board = board
        self._incarnation = board.incarnations[rank]
        self._epoch: Epoch | None = None

    @classmethod
    def group(cls, size: int, timeout: float = 60.0) -> list[Self]:
        """The exchanges of all ranks, in rank order."""
        board = _Board([0] * size)
        return [cls(board, rank, timeout) for rank in range(size)]

    def restarted(self) -> Self:
        """This rank's exchange in a new process, as it were: the old one is of no more use, and the others regroup."""
        with self._board.changed:
            self._board.incarnations[self.rank] += 1
            self._board.changed.notify_all()
            return type(self)(self._board, self.rank, self.timeout)

    def _meet(self, call: Call) -> dict[int, bytes]:
        board, started = self._board, time.monotonic()
        with board.changed:
            self._must_be_current()  # before it posts: a message of a process that was replaced could complete a call
            epoch = self._epoch = self._epoch or tuple(board.incarnations)
            board.posts[epoch, call.number, self.rank] = call
            self._count(sent=sum(len(call.to(rank) or b"") for rank in self.others))
            board.changed.notify_all()
            while (found := self._found(epoch, call)) is None:
                left = started + self.timeout - time.monotonic()
                if left <= 0:
                    missing = [rank for rank in call.sources if (epoch, call.number, rank) not in board.posts]
                    raise self._missing(call, missing, self.timeout)
                board.changed.wait(left)
            self._forget(epoch, call)
        self._count(received=sum(map(len, found.values())))
        return found

    def _found(self, epoch: Epoch, call: Call) -> dict[int, bytes] | None:
        """The messages that the call awaits, once all are there."""
        self._must_be_current()
        posts = {rank: post for rank in call.sources if (post := self._board.posts.get((epoch, call.number, rank))) is not None}
        for rank, post in posts.items():
            self._must_be_same(call, rank, post.name)
        messages = {rank: message for rank, post in posts.items() if (message := post.to(self.rank)) is not None}
        if silent := sorted(posts.keys() - messages.keys()):
            raise ExchangeError(f"rank {silent[0]} has no message for rank {self.rank} in {call.name}, which awaits one")
        if len(posts) == len(call.sources):
            return messages
        if tuple(self._board.incarnations) != epoch:
            self._epoch = None
            raise Regrouped(f"a rank came back as another process during {call.name} of rank {self.rank}: begin the round again")
        return None

    def _must_be_current(self) -> None:
        if self._board.incarnations[self.rank] != self._incarnation:
            raise ExchangeError(f"rank {self.rank} was restarted: this exchange is of its old process")

    def _forget(self, epoch: Epoch, call: Call) -> None:
        """Drop what this rank posted before, once a call has shown that all ranks have read it: each posts after it has read."""
        if isinstance(call.outgoing, bytes):
            for key in [key for key in self._board.posts if key[2] == self.rank and key != (epoch, call.number, self.rank)]:
                del self._board.posts[key]
