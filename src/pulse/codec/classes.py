"""Which classes the units of a lane fall into, by the exponents of their base: decided from a sample, written into the header.

A step of the optimizer is visible where it is about as large as the distance between two representable numbers, and that follows from the
exponent. So the units of one exponent change with about the same probability, and those of two others with two other ones. Neighbouring
exponents of nearly equal density share a class, since every class costs a few bytes per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.bits import DType
from pulse.coder import CLASSES, QUARTERS
from pulse.errors import FormatError

_PER_CLASS = 100.0  # bits that a class costs a patch, about: its entry in the header
_PER_BLOCK = 60.0  # bits that it costs each block: the number of its changes, and what contexts learn anew
_MOST_MEAN = (1 << QUARTERS // 4) - 1


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of one lane. exponents: at which a class begins, ascending, the first one aside; means: of its gaps, in 256ths."""

    exponents: tuple[int, ...]
    means: tuple[int, ...]

    def check(self, limit: int) -> None:
        """Raise `FormatError` unless these are classes of so many exponents."""
        if len(self.means) != len(self.exponents) + 1 or len(self.means) > CLASSES:
            raise FormatError(f"{len(self.exponents)} limits and {len(self.means)} means are no classes")
        if any(hi <= lo for lo, hi in pairwise((0, *self.exponents, limit))):
            raise FormatError(f"{self.exponents} do not divide {limit} exponents")
        if not all(1 <= mean <= _MOST_MEAN for mean in self.means):
            raise FormatError("a mean gap that is out of range")

    def cuts(self, dtype: DType) -> NDArray[Any]:
        """The lowest magnitude of each class but the first, (classes - 1,) of the dtype's units."""
        return np.array([exponent << (dtype.mantissa or 0) for exponent in self.exponents], dtype.unsigned)


def exponents_of(dtype: DType) -> int:
    """How many exponents a dtype has; 1 for those that have none."""
    return 1 if dtype.mantissa is None else 1 << (8 * dtype.width - 1 - dtype.mantissa)


def mask_of(dtype: DType) -> Any:
    """The bits of a unit that are its magnitude, as one of its units."""
    return dtype.unsigned.type((1 << (8 * dtype.width - dtype.is_float)) - 1)


def exponent(units: NDArray[Any], dtype: DType) -> NDArray[np.int64]:
    """The exponent field of each unit; 0 for dtypes that have none."""
    if dtype.mantissa is None:
        return np.zeros(units.shape, np.int64)
    field: NDArray[np.int64] = ((units & mask_of(dtype)) >> dtype.unsigned.type(dtype.mantissa)).astype(np.int64)
    return field


def choose(units: NDArray[np.float64], changed: NDArray[np.int64], blocks: int) -> Classes:
    """The classes that cost least. units, changed: (exponents,) how many there are, about, and how many changed; blocks: of the lane."""
    present = np.flatnonzero((units > 0) | (changed > 0))
    if present.size == 0:
        return Classes((), (256,))
    changes = changed[present].astype(np.float64)
    size = np.maximum(units[present], changes)
    price = _PER_CLASS + _PER_BLOCK * blocks
    while len(starts := _cheapest(size, changes, price)) > CLASSES:
        price *= 2
    groups = [(size[lo:hi].sum(), changes[lo:hi].sum()) for lo, hi in pairwise([*starts, present.size])]
    means = tuple(min(max(int(256 * (n - k) / max(k, 1.0)), 1), _MOST_MEAN) for n, k in groups)
    return Classes(tuple(int(present[start]) for start in starts[1:]), means)


def _cheapest(size: NDArray[np.float64], changes: NDArray[np.float64], price: float) -> list[int]:
    """Where to begin a new group, so that the entropy of all groups, and a price for each, is least."""
    n, k = np.cumsum(size, dtype=np.float64), np.cumsum(changes, dtype=np.float64)
    n, k = np.insert(n, 0, 0.0), np.insert(k, 0, 0.0)
    cost = np.zeros(size.size + 1)
    origin = np.zeros(size.size + 1, np.int64)
    for end in range(1, size.size + 1):
        candidates = cost[:end] + entropy(n[end] - n[:end], k[end] - k[:end]) + price
        origin[end] = int(candidates.argmin())
        cost[end] = candidates[origin[end]]
    starts = []
    end = size.size
    while end > 0:
        end = int(origin[end])
        starts.append(end)
    return starts[::-1]


def entropy(n: NDArray[np.float64], k: NDArray[np.float64]) -> NDArray[np.float64]:
    """What it takes to say which k of n units changed: n H(k / n), in bits."""
    share = np.clip(k / np.maximum(n, 1.0), 0.0, 1.0)
    rest = 1.0 - share
    bits: NDArray[np.float64] = -n * (share * np.log2(np.maximum(share, 1e-300)) + rest * np.log2(np.maximum(rest, 1e-300)))
    return bits
