"""Counting the changes of one piece of a tensor at one moment: the plain functions, and which of them runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.analysis.entropy import pairs_of
from pulse.analysis.numbers import LAYOUTS, class_count, classes_of, plain_count_patterns
from pulse.bits import DType, steps_between
from pulse.patch import Positions

SIZES = 64  # |step| of 1, 2, 3 to 4, 5 to 8, …, up to 2^63
_SIZE_EDGES = np.uint64(1) << np.arange(SIZES, dtype=np.uint64)
_KERNEL_FROM = 1 << 14  # units from which compiled code pays


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """What a piece of a tensor did up to a moment; moment 0 is the start of the sequence, without changes.

    piece: the tensor's name and where in it the piece starts. current: (units,) its bits now. positions: (n,) where it changed since
    the moment before, ascending, counted in the piece; old, new: (n,) bits there. windows: for some k, how many units differ from k
    moments before.
    """

    piece: tuple[str, int]
    dtype: DType
    moment: int
    current: NDArray[Any]
    positions: Positions
    old: NDArray[Any]
    new: NDArray[Any]
    windows: dict[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Where the changes of one moment and dtype are added up.

    sizes: (64,) by |step|; left, arrived: (classes,) by the exponent class before and after; since: (moments + 1, 2) by the number of
    moments since the unit's last change, and by whether it moved the other way or the same way.
    """

    sizes: NDArray[np.int64]
    left: NDArray[np.int64]
    arrived: NDArray[np.int64]
    since: NDArray[np.int64]


def plain_tally(move: Move, last: NDArray[Any], sums: Sums) -> tuple[int, int, int, NDArray[np.uint64]]:
    """Add a move's changes to `sums` and to `last`.

    last: (units,) signed; ±moment of each unit's last change, by its direction, 0 for none. Returns how many steps went up, how many
    units had changed before, how many of these went the same way, and the pairs of `entropy.pairs_of`.
    """
    steps = steps_between(move.old, move.new, move.dtype)
    signed = steps.view(f"<i{move.dtype.width}").astype(np.int64)
    rises = signed > 0
    sums.sizes[:] += np.bincount(np.searchsorted(_SIZE_EDGES, np.abs(signed).view(np.uint64)), minlength=SIZES)
    count = class_count(move.dtype)
    sums.left[:] += np.bincount(classes_of(move.old, move.dtype), minlength=count)
    sums.arrived[:] += np.bincount(classes_of(move.new, move.dtype), minlength=count)
    before = last[move.positions].astype(np.int64)
    again = before != 0
    same = again & ((before > 0) == rises)
    np.add.at(sums.since, (move.moment - np.abs(before[again]), same[again].astype(np.int64)), 1)
    last[move.positions] = np.where(rises, move.moment, -move.moment)
    return int(rises.sum()), int(again.sum()), int(same.sum()), pairs_of(move.old, steps, move.dtype)


def tally(move: Move, last: NDArray[Any], sums: Sums) -> tuple[int, int, int, NDArray[np.uint64]]:
    """`plain_tally`, compiled where that pays."""
    if move.current.size < _KERNEL_FROM:
        return plain_tally(move, last, sums)
    from pulse.analysis import kernels

    layout = LAYOUTS.get(move.dtype.name)
    mirror = (1 << (8 * move.dtype.width - 1)) - 1 if move.dtype.is_float else 0
    rules = np.array([move.moment, layout.mantissa if layout else 0, class_count(move.dtype) - 1, mirror], np.int64)
    pairs = np.empty(move.positions.size, np.uint64)
    up, again, same = kernels.tally(move.positions, move.old, move.new, last, rules, sums.sizes, sums.left, sums.arrived, sums.since, pairs)
    return up, again, same, pairs


def count_patterns(flat: NDArray[Any], counts: NDArray[np.int64]) -> None:
    """`numbers.plain_count_patterns`, compiled where that pays."""
    if flat.size < _KERNEL_FROM:
        plain_count_patterns(flat, counts)
        return
    from pulse.analysis import kernels

    kernels.count_patterns(flat, counts)
