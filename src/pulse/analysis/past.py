"""How much of a tensor differs from k moments ago, exactly, from what changed since, in memory that follows the changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.patch import Positions

WINDOWS = (1, 2, 4, 8, 16, 32)


class Past:
    """What a tensor held where it changed in the last moments: enough to say how much differs from k moments ago, exactly.

    The changes of all moments lie end to end, the newest last; those of moments too long ago are dropped when room runs out.
    """

    def __init__(self, current: NDArray[Any]) -> None:
        self._positions = np.empty(0, np.uint32 if current.size < 1 << 32 else np.uint64)
        self._old = np.empty(0, current.dtype)
        self._bounds = [0]

    @property
    def changes(self) -> int:
        """How many changes lie within the longest window."""
        return self._bounds[-1] - self._bounds[-WINDOWS[-1] - 1 :][0]

    def add(self, positions: Positions, old: NDArray[Any]) -> None:
        """Add the changes of a moment."""
        start, stop = self._bounds[-1], self._bounds[-1] + positions.size
        if stop > self._positions.size:
            kept = self._bounds[-WINDOWS[-1] :]
            size = 2 * (start - kept[0] + positions.size)
            for name in ("_positions", "_old"):
                held = getattr(self, name)
                grown = np.empty(size, held.dtype)
                grown[: start - kept[0]] = held[kept[0] : start]
                setattr(self, name, grown)
            self._bounds = [bound - kept[0] for bound in kept]
            start, stop = self._bounds[-1], self._bounds[-1] + positions.size
        self._positions[start:stop] = positions
        self._old[start:stop] = old
        self._bounds.append(stop)

    def windows(self, current: NDArray[Any], scratch: NDArray[np.bool_]) -> dict[int, int]:
        """For each k, how many units differ from k moments ago. scratch: at least as many falses as units; left as it was."""
        bounds = np.array(self._bounds[-WINDOWS[-1] - 1 :])
        differ = look_back(self._positions, self._old, bounds, current, scratch[: current.size])
        return {k: int(differ[k - 1]) for k in WINDOWS if k <= differ.size}


def plain_look_back(
    positions: NDArray[Any], old: NDArray[Any], bounds: NDArray[np.int64], current: NDArray[Any], scratch: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """How many units differ now from before each moment, going back over the changes of several, the newest first.

    positions, old: what was where, ascending in each moment; bounds: (moments + 1,) where each moment's changes begin and end, the
    newest last; scratch: as `Past.windows` says. (moments,) int64.
    """
    found = np.zeros(bounds.size - 1, np.int64)
    for moment, (stop, start) in enumerate(pairwise(bounds[::-1].tolist())):
        at = positions[start:stop]
        scratch[at] = old[start:stop] != current[at]
        found[moment] = np.count_nonzero(scratch)
    scratch[positions[bounds[0] : bounds[-1]]] = False
    return found


def look_back(
    positions: NDArray[Any], old: NDArray[Any], bounds: NDArray[np.int64], current: NDArray[Any], scratch: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """`plain_look_back`, compiled where that pays."""
    if current.size < 1 << 14:
        return plain_look_back(positions, old, bounds, current, scratch)
    from pulse.analysis import kernels

    found: NDArray[np.int64] = kernels.look_back(positions, old, bounds, current, scratch)
    return found
