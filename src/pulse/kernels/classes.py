"""Ranks within the classes of a base, compiled.

Classes are ranges of magnitude: a unit with the bits u belongs to class number (how many of the cuts are <= u & mask). Counting how many
units of a stride reach each cut is a plain comparison, which is vectorised; the sum of two neighbours is a class. Only what changed is
then looked at one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.kernels.compiled import compiled, piece

_STRIDE = 512
_FEW = 24  # changes in a stride up to which each is looked for by itself


@piece
def _count(stretch: Any, cuts: Any, mask: Any, counts: Any) -> None:
    """How many units of a stretch lie in each class."""
    above = stretch.size
    for c in range(cuts.size):
        cut = cuts[c]
        reached = np.uint16(0)  # 16 bits wide, so that 16-bit units are compared as wide as they can be
        for i in range(stretch.size):
            reached = np.uint16(reached + np.uint16((stretch[i] & mask) >= cut))
        counts[c] = above - np.int64(reached)
        above = np.int64(reached)
    counts[cuts.size] = above


@piece
def _class_of(unit: Any, cuts: Any, mask: Any) -> Any:
    c = 0
    for j in range(cuts.size):
        c += (unit & mask) >= cuts[j]
    return c


@piece
def _members(stretch: Any, low: Any, high: Any, mask: Any) -> Any:
    """How many units of a stretch lie in one class."""
    found = np.uint16(0)
    for i in range(stretch.size):
        found = np.uint16(found + np.uint16(((stretch[i] & mask) >= low) & ((stretch[i] & mask) <= high)))
    return np.int64(found)


@piece
def _copy(source: Any, target: Any) -> None:
    for i in range(source.size):  # numba compiles this in no time, and an assignment of arrays in seconds
        target[i] = source[i]


@piece
def _limits(cuts: Any, mask: Any) -> Any:
    """The lowest and the highest magnitude of each class, as wide as the units, so that comparing with them stays vectorised."""
    limits = np.zeros((2, cuts.size + 1), cuts.dtype)
    for c in range(cuts.size):
        limits[1, c] = cuts[c] - 1
        limits[0, c + 1] = cuts[c]
    limits[1, cuts.size] = mask
    return limits


@compiled
def rank(
    flat: NDArray[Any],
    positions: NDArray[np.uint64],
    cuts: NDArray[Any],
    mask: Any,
    seen: NDArray[np.int64],
    classes: NDArray[np.uint8],
    ranks: NDArray[np.uint32],
) -> None:
    """The class and rank of each change in a piece of a base.

    flat: (units,) unsigned; positions: (n,) ascending; cuts: (classes - 1,) ascending, of flat's dtype. seen: (classes,) units of each
    class before the piece; afterwards also those in it. Fills classes and ranks, (n,).
    """
    counts = np.zeros(cuts.size + 1, np.int64)
    inside = np.zeros(cuts.size + 1, np.int64)
    limits = _limits(cuts, mask)
    j = 0
    for start in range(0, flat.size, _STRIDE):
        stop = min(start + _STRIDE, flat.size)
        first = j
        while j < positions.size and positions[j] < np.uint64(stop):
            j += 1
        if j - first <= _FEW:
            for i in range(first, j):
                at = np.int64(positions[i])
                c = _class_of(flat[at], cuts, mask)
                classes[i] = c
                ranks[i] = seen[c] + _members(flat[start:at], limits[0, c], limits[1, c], mask)
        else:
            _copy(seen, inside)
            i = first
            for at in range(start, np.int64(positions[j - 1]) + 1):
                c = _class_of(flat[at], cuts, mask)
                if np.uint64(at) == positions[i]:
                    classes[i] = c
                    ranks[i] = inside[c]
                    i += 1
                inside[c] += 1
        _count(flat[start:stop], cuts, mask, counts)
        for c in range(counts.size):
            seen[c] += counts[c]


@piece
def _nth(flat: Any, start: Any, stop: Any, low: Any, high: Any, mask: Any, n: Any) -> Any:
    """Where the n-th unit (from 0) of a class lies in a stretch that holds it."""
    at = start
    while at + 64 < stop:
        found = _members(flat[at : at + 64], low, high, mask)
        if found > n:
            break
        n -= found
        at += 64
    while True:
        n -= (flat[at] & mask) >= low and (flat[at] & mask) <= high
        if n < 0:
            return at
        at += 1


@piece
def _select_few(
    flat: Any,
    start: Any,
    stop: Any,
    limits: Any,
    mask: Any,
    seen: Any,
    ranks: Any,
    nexts: Any,
    until: Any,
    positions: Any,
    which: Any,
    first: Any,
) -> None:
    """Look for each change of a stretch by itself, and sort them by insertion."""
    total = first
    for c in range(nexts.size):
        for j in range(nexts[c], until[c]):
            at = np.uint64(_nth(flat, start, stop, limits[0, c], limits[1, c], mask, np.int64(ranks[j]) - seen[c]))
            k = total
            while k > first and positions[k - 1] > at:
                positions[k] = positions[k - 1]
                which[k] = which[k - 1]
                k -= 1
            positions[k] = at
            which[k] = j
            total += 1


@piece
def _select_many(
    flat: Any,
    start: Any,
    cuts: Any,
    mask: Any,
    inside: Any,
    ranks: Any,
    nexts: Any,
    until: Any,
    positions: Any,
    which: Any,
    first: Any,
    due: Any,
) -> None:
    """Go through a stretch unit by unit until all its changes are found. inside: units of each class so far; moved on, as nexts is."""
    total = first
    at = start
    while total < first + due:
        c = _class_of(flat[at], cuts, mask)
        if nexts[c] < until[c] and np.int64(ranks[nexts[c]]) == inside[c]:
            positions[total] = at
            which[total] = nexts[c]
            nexts[c] += 1
            total += 1
        inside[c] += 1
        at += 1


@compiled
def select(
    flat: NDArray[Any],
    cuts: NDArray[Any],
    mask: Any,
    seen: NDArray[np.int64],
    ranks: NDArray[np.uint32],
    nexts: NDArray[np.int64],
    stops: NDArray[np.int64],
    positions: NDArray[np.uint64],
    which: NDArray[np.int64],
) -> int:
    """The inverse of `rank`: where the changes in a piece of a base lie.

    ranks: (changes in the block,), class after class, ascending in each; nexts, stops: (classes,) where each class goes on and ends; those
    found move `nexts` on. Fills positions, and `which` of the ranks each is, ascending by position; returns how many were found.
    """
    counts = np.zeros(cuts.size + 1, np.int64)
    until = np.zeros(cuts.size + 1, np.int64)
    inside = np.zeros(cuts.size + 1, np.int64)
    limits = _limits(cuts, mask)
    total = 0
    for start in range(0, flat.size, _STRIDE):
        stop = min(start + _STRIDE, flat.size)
        _count(flat[start:stop], cuts, mask, counts)
        due = 0
        for c in range(counts.size):
            j = nexts[c]
            while j < stops[c] and np.int64(ranks[j]) < seen[c] + counts[c]:
                j += 1
            until[c] = j
            due += j - nexts[c]
        if due <= _FEW:
            _select_few(flat, start, stop, limits, mask, seen, ranks, nexts, until, positions, which, total)
        else:
            _copy(seen, inside)
            _select_many(flat, start, cuts, mask, inside, ranks, nexts, until, positions, which, total, due)
        total += due
        for c in range(counts.size):
            seen[c] += counts[c]
            nexts[c] = until[c]
    return total
