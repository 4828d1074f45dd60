"""How far each weight is from changing its view, compiled: the twin of `pulse.codec.cells.levels_of`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.kernels.compiled import compiled, piece

_STRIDE = 4096
_MAGNITUDE, _MANTISSA, _ONE, _TWO = np.uint32(0x7FFFFFFF), np.uint32(23), np.uint32(1), np.uint32(2)
_TO_QUARTERS, _BIAS = np.uint32(21), np.uint32(127 << 2)


@piece
def _distance_among(size: Any, midpoints: Any) -> Any:
    """Steps to the nearer of the midpoints around a number that lies below the last of them."""
    k = 0
    span = midpoints.size
    while span > 0:  # the first midpoint above it, by halving
        half = span >> 1
        if np.int64(midpoints[k + half]) <= size:
            k += half + 1
            span -= half + 1
        else:
            span = half
    inward = size - np.int64(midpoints[k - 1]) if k > 0 else size + np.int64(midpoints[0]) + 1
    return min(np.int64(midpoints[k]) - size, inward)


@compiled
def levels(patterns: NDArray[np.uint32], drop: int, least: int, midpoints: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    """The level of each weight. patterns: (n,) FP32 bits; drop, least, midpoints: as `Cells` has them; fills out, (n,)."""
    nearer = np.empty(_STRIDE, np.float32)
    logarithm = nearer.view(np.uint32)
    cell = np.uint32(1) << np.uint32(drop)  # unsigned throughout, so that the loops are vectorised
    half, rest = cell >> _ONE, cell - _ONE
    limit = (np.uint32(least) << _MANTISSA) + half
    for start in range(0, patterns.size, _STRIDE):
        stretch, result = patterns[start : start + _STRIDE], out[start : start + _STRIDE]
        for i in range(stretch.size):
            inward = ((stretch[i] & _MAGNITUDE) + half) & rest
            distance = min(inward, np.uint32(cell - inward))
            nearer[i] = np.float32(np.int32(distance | np.uint32(distance == 0)))
        if midpoints.size > 0:
            for i in range(stretch.size):
                size = stretch[i] & _MAGNITUDE
                if size < limit:
                    nearer[i] = np.float32(max(_distance_among(np.int64(size), midpoints), 1))
        for i in range(stretch.size):
            exponent = (stretch[i] & _MAGNITUDE) >> _MANTISSA
            exponent |= np.uint32(exponent == 0)
            result[i] = np.uint16(np.uint32(logarithm[i] >> _TO_QUARTERS) - _BIAS + np.uint32(exponent << _TWO))
