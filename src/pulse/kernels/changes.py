"""Where two tensors differ, and writing there, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.kernels.compiled import compiled

_STRIDE = 4096  # units compared at a time: the answers stay in the nearest cache


@compiled
def changed_positions(old: NDArray[Any], new: NDArray[Any]) -> NDArray[np.uint64]:
    """Where two tensors differ, ascending. old, new: (units,) unsigned; returns (n,) uint64."""
    differ = np.zeros(_STRIDE, np.uint8)
    eights = differ.view(np.uint64)  # most of them are 0, and passed by at once
    positions = np.empty(old.size // 64 + _STRIDE, np.uint64)
    found = 0
    for start in range(0, old.size, _STRIDE):
        before, after = old[start : start + _STRIDE], new[start : start + _STRIDE]
        for i in range(before.size):
            differ[i] = before[i] != after[i]
        for i in range(before.size, _STRIDE):
            differ[i] = 0
        if found + _STRIDE > positions.size:
            more = np.empty(2 * positions.size, np.uint64)
            for i in range(found):
                more[i] = positions[i]
            positions = more
        for i in range(eights.size):
            if eights[i] != np.uint64(0):
                for at in range(8 * i, 8 * i + 8):
                    positions[found] = start + at
                    found += differ[at]
    return positions[:found].copy()


@compiled
def scatter(flat: NDArray[Any], positions: NDArray[np.uint64], values: NDArray[Any]) -> None:
    """flat[positions] = values. flat: (units,) unsigned; positions: (n,) uint64, inside; values: (n,) of flat's dtype."""
    for i in range(positions.size):
        flat[positions[i]] = values[i]
