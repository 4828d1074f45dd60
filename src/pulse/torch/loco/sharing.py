"""How payloads of all ranks become one sum: everyone sends everything to everyone, or each rank adds up a range for all.

Both give the same bits: a sum runs in rank order from 0 either way. The first costs a rank (R - 1) payloads, the second about two, whatever
R is: it pays from about four ranks on (docs/loco.md).

A rank that cannot read what arrives says so and goes on to the vote, as all others do: nobody waits for a call that it would not make.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pulse.codec import payload
from pulse.codec.payload import Entries
from pulse.digest import sha256
from pulse.errors import ExchangeError, PulseError, RoundRefused
from pulse.torch.loco.calls import Calls
from pulse.torch.loco.layout import Layout
from pulse.torch.loco.methods import Part, Sparse, Wire, anchor_bits, parts_of, within
from pulse.torch.loco.rounds import Outgoing


@dataclass
class Arrived:
    """What all ranks sent. parts: per rank, in rank order, or their sum in place of them; nbytes: of the payloads that this rank sent, each
    counted once however many ranks it goes to; fault: why this rank could not read them, or empty; seconds: of reading."""  # noqa: D205, D209

    parts: list[list[Part]] = field(default_factory=list)
    nbytes: int = 0
    fault: str = ""
    seconds: float = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note what is wrong with what others sent; that the ranks did not meet is another matter."""
        started = time.perf_counter()
        try:
            yield
        except ExchangeError:
            raise
        except PulseError as error:
            self.fault = self.fault or f"{type(error).__name__}: {error}"
        self.seconds += time.perf_counter() - started


def borders_of(layout: Layout, ranks: int) -> list[int]:
    """Where the range of each rank begins and the last one ends."""
    return [layout.elements * r // ranks for r in range(ranks + 1)]


def gather(
    calls: Calls, outgoing: Outgoing, announced: Sequence[Sequence[str]], wire: Wire, anchor: Sequence[Tensor], layout: Layout
) -> Arrived:
    """Everyone's payload. announced: the SHA-256 of each rank's payloads."""
    arrived = Arrived(nbytes=len(outgoing.blob))
    blobs = calls.gather("payload", outgoing.blob)
    with arrived.reading():
        _check(blobs, [digests[0] for digests in announced])
        arrived.parts = wire.decode(blobs, anchor, layout)
    return arrived


def scatter(
    calls: Calls,
    outgoing: Outgoing,
    announced: Sequence[Sequence[str]],
    wire: Sparse,
    anchor: Sequence[Tensor],
    layout: Layout,
    weights: Sequence[float] | None,
) -> Arrived:
    """The sum of everyone's payloads, of which this rank adds up one range."""
    rank, borders = calls.exchange.rank, borders_of(layout, calls.exchange.size)
    known = anchor_bits(anchor, layout, gated=wire.gated)
    blobs = calls.scatter("payload", outgoing.blobs)
    arrived, mine = Arrived(), b""
    with arrived.reading():
        _check(blobs, [digests[rank] for digests in announced])
        entries = payload.decode(blobs, within(known, borders[rank], borders[rank + 1]))
        total = added(entries, borders[rank + 1] - borders[rank], weights)
        mine = payload.encode(total, within(known, borders[rank], borders[rank + 1], gated=False)).blob  # a sum need not cross a border
    arrived.nbytes = sum(map(len, outgoing.blobs)) - len(outgoing.blobs[rank]) + len(mine)
    sums = calls.gather("sum", mine)
    with arrived.reading():
        arrived.parts = [list(parts_of(_joined(sums, known, borders), anchor, layout))]
    return arrived


def _check(blobs: Sequence[bytes], announced: Sequence[str]) -> None:
    for rank, (blob, digest) in enumerate(zip(blobs, announced, strict=True)):
        if sha256(blob) != digest:
            raise RoundRefused(f"the payload of rank {rank} is not the one that it announced", (rank,))


def _joined(sums: Sequence[bytes], known: payload.Anchor, borders: Sequence[int]) -> Entries:
    """The sums of all ranges, laid end to end."""
    found = []
    for rank, (blob, (lo, hi)) in enumerate(zip(sums, pairwise(borders), strict=True)):
        if not blob:
            raise RoundRefused(f"rank {rank} could not add up its range", (rank,))
        positions, values = payload.decode([blob], within(known, lo, hi, gated=False))[0]
        found.append(Entries(positions + np.uint64(lo), values))
    return Entries(np.concatenate([few.positions for few in found]), np.concatenate([few.values for few in found]))


def added(arrived: Sequence[Entries], elements: int, weights: Sequence[float] | None) -> Entries:
    """The sum of several ranks' entries, in rank order from 0, as `pulse.torch.loco.rounds.mean` has it before it divides."""
    total, sent = torch.zeros(elements), torch.zeros(elements, dtype=torch.bool)
    for r, entries in enumerate(arrived):
        positions, values = torch.from_numpy(entries.positions.astype(np.int64)), torch.from_numpy(entries.values)
        total[positions] += values if weights is None else values * weights[r]
        sent[positions] = True
    positions = torch.nonzero(sent).view(-1)
    return Entries(positions.numpy().astype(np.uint64), total[positions].numpy())
