"""One attempt at a round.

    meet       every rank says where it stands; all see the same words and decide the same (`meeting`)
    resync     whoever has another anchor takes over the right one, and all meet again
    payload    everyone's payload, or the sum of them (`sharing`)
    vote       only if all could read everything is there a round
    commit     E, B, A and L change together (`rounds`)
    proof      the digests of the new anchors are compared

Until the vote nothing has changed, whatever fails, and the attempt can be repeated. Where parameters are sharded, the shards of a trainer
agree at every turn, so that none commits what another refuses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pulse.errors import ExchangeError, PulseError, Regrouped, RoundRefused
from pulse.torch.loco import meeting, sharing
from pulse.torch.loco.calls import Calls
from pulse.torch.loco.meeting import Resync, Stand, Verdict, Vote, Word
from pulse.torch.loco.methods import Sparse
from pulse.torch.loco.rank import Rank
from pulse.torch.loco.report import Report
from pulse.torch.loco.rounds import Outcome, Outgoing


class Attempt:
    """One rank's part in it. stand: where the rank stands when it comes."""

    def __init__(self, rank: Rank, calls: Calls, stand: Stand) -> None:
        self._rank, self._calls, self._stand = rank, calls, stand
        self._number, self._size = calls.exchange.rank, calls.exchange.size
        self._traffic = calls.exchange.traffic
        self._seconds: dict[str, float] = {}

    def run(self) -> Report | None:
        """Meet until there was a round, or until this rank can go on without one; then None."""
        self._rank.look()
        whole = self._rank.is_whole()
        while True:
            try:
                outgoing = None if self._stand is Stand.INSIDE else self._outgoing()
                words = self._meet(outgoing, whole=whole)
                odd, again, is_odd = self._odd(words)
                if again:
                    self._resync(odd, words, is_odd=is_odd)
                    whole = whole or is_odd
                    continue
                what = meeting.verdict(words)
                if what is Verdict.ROUND and outgoing is not None:
                    return self._round(words, outgoing)
                if what is Verdict.OVER or meeting.trains_on(self._stand, words):
                    return None
            except Regrouped:  # another rank is a new process: nothing of this counts
                if (
                    self._rank.island.sharded
                ):  # the ranks of other shards may have met all the same: only a restart of all puts them in step
                    raise
                self._calls.begin_anew()

    def _outgoing(self) -> Outgoing:
        borders = sharing.borders_of(self._rank.layout, self._size) if self._rank.options.share == "scatter" else None
        with self._timed("encode"):
            return self._rank.outgoing(self._number, borders)

    def _meet(self, outgoing: Outgoing | None, *, whole: bool) -> list[Word]:
        word = self._rank.word(self._stand, outgoing, whole=whole)
        with self._timed("meet"):
            return [Word.from_bytes(data) for data in self._calls.gather("meet", word.to_bytes())]

    def _odd(self, words: Sequence[Word]) -> tuple[Resync | None, bool, bool]:
        """Who must take over whose state; whether anyone must in any shard, and whether this trainer must in any shard."""
        fault, odd = None, None
        try:
            meeting.check(words)
            odd = meeting.resync(words)
        except PulseError as error:
            fault = error
        mine = odd is not None and self._number in odd.ranks
        failed, again, is_odd = self._rank.island.any(fault is not None, odd is not None, mine)
        if failed:
            raise fault or RoundRefused("another shard of this trainer cannot take part, and says why")
        return odd, again, is_odd

    def _resync(self, odd: Resync | None, words: Sequence[Word], *, is_odd: bool) -> None:
        """Hand the state of one rank to those that differ. A trainer that takes over one shard gives up its window in all."""
        with self._timed("resync"):
            if odd is not None:
                outgoing = dict.fromkeys(odd.ranks, self._rank.pack()) if self._number == odd.source else {}
                mine = self._number in odd.ranks
                found = self._calls.route("resync", outgoing, [odd.source] if mine else [])
                self._rank.resynced = tuple(sorted({*self._rank.resynced, *odd.ranks}))
                if mine:
                    self._rank.take_over(found[odd.source], words[odd.source].digest)
            if is_odd:
                self._rank.rollback()
                self._stand = self._stand if self._stand is Stand.DONE else Stand.GUEST
        if is_odd and self._rank.options.on_resync is not None:
            self._rank.options.on_resync()

    # --- the round ---

    def _round(self, words: Sequence[Word], outgoing: Outgoing) -> Report:
        """Payloads, the vote that all could read them, and only then the commit."""
        equal = len({word.weight for word in words}) == 1
        weights = None if equal else [word.weight for word in words]
        steps, arrived = self._rank.steps, self._arrived(words, outgoing, weights)
        sizes = self._vote(arrived)
        with self._timed("commit"):
            if self._rank.options.share == "gather":
                outcome = self._rank.commit(outgoing, arrived.parts, weights, None)
            else:
                outcome = self._rank.commit(outgoing, arrived.parts, None, sum(weights) if weights else float(self._size))
        return self._report(outcome, words, sizes, steps)

    def _arrived(self, words: Sequence[Word], outgoing: Outgoing, weights: Sequence[float] | None) -> sharing.Arrived:
        rank, announced = self._rank, [word.payloads for word in words]
        wire, anchor, layout = rank.options.method.wire, rank.state.anchor, rank.layout
        with self._timed("exchange"):
            if rank.options.share == "scatter" and isinstance(wire, Sparse):
                arrived = sharing.scatter(self._calls, outgoing, announced, wire, anchor, layout, weights)
            else:
                arrived = sharing.gather(self._calls, outgoing, announced, wire, anchor, layout)
        self._seconds["exchange"] -= arrived.seconds
        self._seconds["decode"] = arrived.seconds
        return arrived

    def _vote(self, arrived: sharing.Arrived) -> tuple[int, ...]:
        """Go on only if every rank, and every shard of every rank, could read everything; then the bytes of each rank's payloads."""
        with self._timed("vote"):
            votes = [Vote.from_bytes(data) for data in self._calls.gather("vote", Vote(arrived.nbytes, arrived.fault).to_bytes())]
        against = tuple(rank for rank, vote in enumerate(votes) if vote.fault)
        (refused,) = self._rank.island.any(bool(against))
        if refused:
            said = "; ".join(f"rank {rank}: {votes[rank].fault}" for rank in against) or "another shard's ranks say which"
            raise RoundRefused(f"a payload could not be read, nothing has changed ({said})", against)
        return tuple(vote.nbytes for vote in votes)

    def _report(self, outcome: Outcome, words: Sequence[Word], sizes: tuple[int, ...], steps: int) -> Report:
        rank, differing = self._rank, self._differing()
        resynced, rank.resynced = rank.resynced, ()
        traffic = self._calls.exchange.traffic - self._traffic
        return Report(
            round=rank.state.round,
            elements=rank.layout.elements,
            sent=outcome.sent,
            union=outcome.union,
            view_changed=outcome.view_changed,
            payload_bytes=sizes,
            wire_sent=traffic.sent,
            wire_received=traffic.received,
            inner_steps=steps,
            feedback_norm=outcome.feedback_norm,
            age_mean=outcome.age_mean,
            age_max=outcome.age_max,
            seconds=dict(self._seconds),
            digest=rank.digest,
            differing=differing,
            resynced=resynced,
            dropped=tuple(number for number, word in enumerate(words) if word.dropped),
        )

    def _differing(self) -> tuple[int, ...]:
        """The ranks whose new anchor is not the one that most have. They take over another at the next meeting."""
        try:
            with self._timed("proof"):
                digests = [data.decode() for data in self._calls.gather("proof", self._rank.digest.encode())]
        except Regrouped:
            self._calls.begin_anew()
            return ()
        except ExchangeError as error:  # the round is committed: the next meeting says what is wrong
            self._calls.fail_next(error)
            return ()
        return meeting.odd_ones(digests)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started
