"""The state digest's mixer, in numpy: the reference that compiled kernels are proven equal to.

For position p (counted in units) and bits v, zero-extended to 64 bits, everything modulo 2^64:

    h = (p + 1) * C0;   h ^= h >> 32
    x = (v ^ h) * C1;   x ^= x >> 29;   x *= C2;   x ^= x >> 32        lane 0
    y = (v + h) * C3;   y ^= y >> 31;   y *= C4;   y ^= y >> 30        lane 1

For a fixed position each lane is a bijection of v, so a single wrong value always shows; the mixer is nonlinear in position and
value together, so swapped or shifted values show up too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

C0, C1, C2, C3, C4 = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
    0xFF51AFD7ED558CCD,
    0xC4CEB9FE1A85EC53,
)


def lanes(positions: NDArray[np.uint64], values: NDArray[Any]) -> tuple[int, int]:
    """Both lanes, summed. positions: (n,) uint64; values: (n,) unsigned."""
    with np.errstate(over="ignore"):
        h = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(C0)
        h ^= h >> np.uint64(32)
        v = values.astype(np.uint64)
        x = (v ^ h) * np.uint64(C1)
        x ^= x >> np.uint64(29)
        x *= np.uint64(C2)
        x ^= x >> np.uint64(32)
        y = (v + h) * np.uint64(C3)
        y ^= y >> np.uint64(31)
        y *= np.uint64(C4)
        y ^= y >> np.uint64(30)
        return int(x.sum(dtype=np.uint64)), int(y.sum(dtype=np.uint64))
