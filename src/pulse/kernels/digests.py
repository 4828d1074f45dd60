"""The state digest's sums, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.kernels.compiled import compiled, piece
from pulse.mixer import C0, C1, C2, C3, C4

_ONE, _S29, _S30, _S31, _S32 = (np.uint64(n) for n in (1, 29, 30, 31, 32))
_C0, _C1, _C2, _C3, _C4 = (np.uint64(c) for c in (C0, C1, C2, C3, C4))


@piece
def _mix(position: Any, value: Any) -> tuple[Any, Any]:  # scalars inside compiled code
    h = (np.uint64(position) + _ONE) * _C0
    h ^= h >> _S32
    v = np.uint64(value)
    x = (v ^ h) * _C1
    x ^= x >> _S29
    x *= _C2
    x ^= x >> _S32
    y = (v + h) * _C3
    y ^= y >> _S31
    y *= _C4
    y ^= y >> _S30
    return x, y


@compiled
def sum_flat(flat: NDArray[Any]) -> tuple[np.uint64, np.uint64]:
    """The digest's two lanes over a whole tensor. flat: (units,) unsigned."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for i in range(flat.size):
        x, y = _mix(i, flat[i])
        lane0 += x
        lane1 += y
    return lane0, lane1


@compiled
def sum_at(positions: NDArray[np.uint64], values: NDArray[Any]) -> tuple[np.uint64, np.uint64]:
    """The digest's two lanes over some positions. positions: (n,) uint64; values: (n,) unsigned."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for i in range(values.size):
        x, y = _mix(positions[i], values[i])
        lane0 += x
        lane1 += y
    return lane0, lane1
