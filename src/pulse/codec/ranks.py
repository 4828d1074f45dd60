"""Ranks within the classes of a base: plain numpy, and compiled kernels where those pay.

A unit with the bits u is in class number (how many of the cuts are <= u & mask); its rank is how many units of its class come before it.
A block's base may come in several pieces: `seen` carries on how many units of each class there were.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse import coder
from pulse.errors import FormatError

_FAST_FROM = 1 << 14  # units from which compiled kernels pay, even if they must first be loaded
_FAST_CHANGES = 1 << 12  # and changes, for the entropy coder
_AT_ONCE = 1 << 5  # changes, once kernels are loaded

Ranked = tuple[NDArray[np.uint8], NDArray[np.uint32]]
Selected = tuple[NDArray[np.uint64], NDArray[np.int64]]


def _compiled_coder_pays(changes: int) -> bool:
    return changes >= (_AT_ONCE if "pulse.kernels" in sys.modules else _FAST_CHANGES)


def rank(flat: NDArray[Any], positions: NDArray[np.uint64], cuts: NDArray[Any], mask: Any, seen: NDArray[np.int64]) -> Ranked:
    """The class and the rank of each change in a piece of a base.

    flat: (units,) unsigned; positions: (n,) uint64, ascending; cuts: (classes - 1,) of flat's dtype; seen: (classes,), moved on.
    """
    if flat.size < _FAST_FROM:
        return plain_rank(flat, positions, cuts, mask, seen)
    from pulse import kernels  # numba loads only when there is work for it

    classes, ranks = np.empty(positions.size, np.uint8), np.empty(positions.size, np.uint32)
    kernels.rank(flat, positions, cuts, mask, seen, classes, ranks)
    return classes, ranks


def plain_rank(flat: NDArray[Any], positions: NDArray[np.uint64], cuts: NDArray[Any], mask: Any, seen: NDArray[np.int64]) -> Ranked:
    """`rank` in numpy alone: the reference."""
    members, starts = _members(flat, cuts, mask, seen.size)
    ranks = np.empty(flat.size, np.int64)
    for c, (lo, hi) in enumerate(pairwise(starts)):
        ranks[members[lo:hi]] = seen[c] + np.arange(hi - lo)
    seen += np.diff(starts)
    classes = np.searchsorted(cuts, flat[positions] & mask, side="right").astype(np.uint8)
    return classes, ranks[positions].astype(np.uint32)


def select(
    flat: NDArray[Any],
    cuts: NDArray[Any],
    mask: Any,
    seen: NDArray[np.int64],
    ranks: NDArray[np.uint32],
    nexts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> Selected:
    """The inverse: the positions of the changes in a piece of a base, ascending, and which of the ranks each is.

    ranks: of the whole block, class after class, ascending in each; nexts, stops: (classes,) where each class goes on in them, moved on,
    and where it ends.
    """
    if flat.size < _FAST_FROM:
        return plain_select(flat, cuts, mask, seen, ranks, nexts, stops)
    from pulse import kernels

    room = min(int((stops - nexts).sum()), flat.size)
    positions, which = np.empty(room, np.uint64), np.empty(room, np.int64)
    found = kernels.select(flat, cuts, mask, seen, ranks, nexts, stops, positions, which)
    return positions[:found], which[:found]


def plain_select(
    flat: NDArray[Any],
    cuts: NDArray[Any],
    mask: Any,
    seen: NDArray[np.int64],
    ranks: NDArray[np.uint32],
    nexts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> Selected:
    """`select` in numpy alone: the reference."""
    members, starts = _members(flat, cuts, mask, seen.size)
    positions: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    which: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    for c, (lo, hi) in enumerate(pairwise(starts)):
        wanted = ranks[nexts[c] : stops[c]].astype(np.int64) - seen[c]
        due = int(np.searchsorted(wanted, hi - lo))
        positions.append(members[lo:hi][wanted[:due]])
        which.append(np.arange(nexts[c], nexts[c] + due))
        nexts[c] += due
    seen += np.diff(starts)
    found, order = np.concatenate(positions), np.concatenate(which)
    ascending = np.argsort(found)
    return found[ascending].astype(np.uint64), order[ascending]


def _members(flat: NDArray[Any], cuts: NDArray[Any], mask: Any, classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the units of each class are, class after class, and where each class begins in that."""
    class_of = np.searchsorted(cuts, flat & mask, side="right")
    starts = np.concatenate([[0], np.cumsum(np.bincount(class_of, minlength=classes))])
    return np.argsort(class_of, kind="stable"), starts


def encode(ranks: NDArray[np.uint32], folded: NDArray[np.uint64], starts: NDArray[np.int64], means: Sequence[int], check: int) -> bytes:
    """`coder.encode`, compiled where that pays; given more room until there is enough."""
    if not _compiled_coder_pays(ranks.size):
        return coder.encode(ranks.tolist(), folded.tolist(), starts.tolist(), means, check)
    from pulse import kernels

    room = 2 * ranks.size + 256
    while True:
        out = np.empty(room, np.uint32)
        start, table = np.array(means, np.uint64), coder.START.copy()
        low, width, words = kernels.encode(ranks, folded, starts, start, np.uint64(check), table, out)
        if words != kernels.FULL:
            return coder.finish(out[:words].astype(">u4").tobytes(), int(low), int(width))
        room *= 2


def decode(
    data: bytes | memoryview, means: Sequence[int], count: int, size: int, highest: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.int64], int]:
    """`coder.decode`, compiled where that pays: ranks, folded steps (none if `highest` is 0), starts, check."""
    if not _compiled_coder_pays(count):
        found = coder.decode(bytes(data), len(means), means, count, size, highest)
        return np.array(found[0], np.uint32), np.array(found[1], np.uint64), np.array(found[2], np.int64), found[3]
    from pulse import kernels

    ranks, folded = np.empty(count, np.uint32), np.empty(count if highest else 0, np.uint64)
    starts = np.zeros(len(means) + 1, np.int64)
    start, table, code = np.array(means, np.uint64), coder.START.copy(), np.frombuffer(data, np.uint8)
    check, number = kernels.decode(code, start, np.uint64(size), np.uint64(highest), table, ranks, folded, starts)
    if number != count:
        raise FormatError(f"a block of {count} changes is malformed")
    return ranks, folded, starts, int(check)
