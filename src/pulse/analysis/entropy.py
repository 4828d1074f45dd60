"""The reference entropy: what positions and steps would cost if exponent classes were all that a receiver knew.

Per exponent class, all tensors of one dtype together: n H(k/n) bits say which k of the n weights of a class change, and k times the
empirical entropy of its zig-zag steps say by how much. With L(x) = x log2 x the sum over both is L(n) - L(n - k) - sum of L(count of
each step). No true floor: history and better models go below it, and it charges nothing for its own parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.analysis.numbers import class_count, classes_of
from pulse.bits import DType, TensorBits, dtype_of, steps_between
from pulse.codec.sections import zigzag
from pulse.errors import WeightsMismatch
from pulse.patch import changed_positions

MAX_PAIRS = 1 << 20  # distinct (class, step) pairs that are kept for one step of training: 16 MiB
_TOGETHER = 1 << 17  # pairs that are sorted at a time: 1 MiB


def x_log_x(counts: NDArray[Any]) -> float:
    """Sum of x log2 x over counts, 0 for 0."""
    some = counts[counts > 0].astype(np.float64)
    return float(np.sum(some * np.log2(some)))


def pairs_of(old: NDArray[Any], steps: NDArray[Any], dtype: DType) -> NDArray[np.uint64]:
    """The (class of the old bits, zig-zag of the step) of each change, as one number. (n,) uint64; of no use for F64, which has no room."""
    shift = np.uint64(8 * dtype.width & 63)
    found: NDArray[np.uint64] = (classes_of(old, dtype).astype(np.uint64) << shift) | zigzag(steps).astype(np.uint64)
    return found


class Pairs:
    """How often each pair occurs, as long as there are few enough distinct ones."""

    def __init__(self) -> None:
        self._pairs, self._counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._waiting: list[NDArray[np.uint64]] = []
        self._size = 0
        self._lost = False

    def add(self, pairs: NDArray[np.uint64]) -> None:
        """Count these too. They may be in any order, and are sorted later, many at a time."""
        if not self._lost:
            self._waiting.append(pairs)
            self._size += pairs.size
            if self._size > _TOGETHER:
                self._merge()

    def counts(self) -> NDArray[np.int64] | None:
        """The number of each distinct pair, in any order; None if there were too many to keep."""
        self._merge()
        return None if self._lost else self._counts

    def _merge(self) -> None:
        if not self._waiting:
            return
        found, counts = np.unique(np.concatenate(self._waiting), return_counts=True)
        self._waiting, self._size = [], 0
        both, where = np.unique(np.concatenate([self._pairs, found]), return_inverse=True)
        self._pairs = both
        self._counts = np.bincount(where, np.concatenate([self._counts, counts])).astype(np.int64)
        if both.size > MAX_PAIRS:
            self._pairs, self._counts, self._lost = np.zeros(0, np.uint64), np.zeros(0, np.int64), True


def bits_of(units: NDArray[Any], changed: NDArray[Any], pairs: Pairs) -> float | None:
    """The reference entropy of one dtype. units, changed: (classes,) counts; None if there were too many pairs to keep."""
    counts = pairs.counts()
    return None if counts is None else x_log_x(units) - x_log_x(units - changed) - x_log_x(counts)


def reference_bits(old: Mapping[str, TensorBits], new: Mapping[str, TensorBits]) -> float | None:
    """The reference entropy, in bits, of the step from `old` to `new`, which must have the same tensors (else `WeightsMismatch`).

    None where it cannot be known in bounded memory: F64 tensors changed, or there are millions of distinct steps, as between FP32 masters.
    """
    if {name: bits.spec for name, bits in old.items()} != {name: bits.spec for name, bits in new.items()}:
        raise WeightsMismatch("the reference entropy is that of a step between two sets of the same tensors")
    units: dict[str, NDArray[np.int64]] = {}
    changed: dict[str, NDArray[np.int64]] = {}
    pairs: dict[str, Pairs] = {}
    for name, before in old.items():
        dtype, count = dtype_of(before.dtype), class_count(dtype_of(before.dtype))
        positions = changed_positions(before.flat, new[name].flat)
        was, now = before.flat[positions], new[name].flat[positions]
        for totals, found in ((units, before.flat), (changed, was)):
            totals[dtype.name] = totals.get(dtype.name, 0) + np.bincount(classes_of(found, dtype), minlength=count)
        pairs.setdefault(dtype.name, Pairs()).add(pairs_of(was, steps_between(was, now, dtype), dtype))
    return total_bits({name: (units[name], changed[name], pairs[name]) for name in units})


def total_bits(dtypes: Mapping[str, tuple[NDArray[Any], NDArray[Any], Pairs]]) -> float | None:
    """The sum over dtypes of `bits_of`; None if one of them is not known."""
    total = 0.0
    for name, (units, changed, pairs) in dtypes.items():
        bits = None if name == "F64" and changed.any() else bits_of(units, changed, pairs)
        if bits is None:
            return None
        total += bits
    return total
