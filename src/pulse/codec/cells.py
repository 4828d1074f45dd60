"""Where FP32 weights lie in the cells of their view: all numbers that round to one number of the view are its cell.

A weight changes its view by crossing a border of its cell: the midpoint between two neighbouring numbers of the view. Distances are counted
in steps, as `pulse.bits.to_key` orders FP32 patterns, outward (away from zero) and inward. They are what both sides of an exchange know
beforehand of an entry: they guide a payload's coding, and that values arrive does not depend on their being right. Two liberties keep them
simple: the cells go on beyond a view's largest finite number, as if there were more; and the zeros of a view are one number with one cell,
though they differ in bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pulse.bits import dtype_of
from pulse.errors import UnsupportedFormat

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_MANTISSA = 23  # of FP32
_FAST_FROM = 1 << 14  # units from which a compiled kernel pays
LEVELS = 4 * (255 + 24)  # quarter octaves that a distance can take
_SMALLEST = {"F32": 1, "BF16": 1, "F16": 113, "F8_E4M3": 121, "F8_E5M2": 113, "F8_E4M3FNUZ": 120, "F8_E5M2FNUZ": 112}


@dataclass(frozen=True)
class Cells:
    """The cells of a view.

    drop: mantissa bits of FP32 that it lacks; least: FP32's exponent field of its smallest normal number; midpoints: (k,) uint32, the FP32
    patterns of the midpoints up to the first one above that: there the view's numbers are equally far apart.
    """

    drop: int
    least: int
    midpoints: NDArray[np.uint32]

    @property
    def half(self) -> int:
        """Steps from a number of the view to the midpoints beside it, where they are normal."""
        return 1 << self.drop >> 1


@lru_cache
def cells_of(view: str) -> Cells:
    """The cells of a view, by its safetensors code; `UnsupportedFormat` for a dtype that is no view of FP32."""
    if view not in _SMALLEST:
        raise UnsupportedFormat(f"{view[:40]!r} is no view of FP32 weights; {', '.join(_SMALLEST)} are")
    drop, least = _MANTISSA - (dtype_of(view).mantissa or 0), _SMALLEST[view]
    if least == 1:
        return Cells(drop, least, np.empty(0, np.uint32))
    odd = 2 * np.arange((1 << (_MANTISSA - drop)) + 1) + 1
    distance = np.float32(2.0) ** (least - 150 + drop - 1)  # half of that between two numbers of the view
    return Cells(drop, least, (odd.astype(np.float32) * distance).view(np.uint32))


def borders(patterns: NDArray[np.uint32], cells: Cells) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many steps the borders of each weight's cell are away, outward and inward, at least 1. patterns: (n,) FP32 bits.

    That many steps lead to the next midpoint outward, and to the last one inward: from the cell of the zeros over both of them to the first
    one on the other side. A midpoint itself lies in the cell of its even neighbour, as a cast rounds it, 1 step from the other. So a cast
    changes after as many steps or, where the midpoint it leads to is a tie that goes back, after one more. A view of FP32 changes with
    every step: 1 and 1.
    """
    size = (patterns & _MAGNITUDE).astype(np.int64)
    if not cells.drop:
        return np.ones_like(size), np.ones_like(size)
    small = size <= (cells.least << _MANTISSA) + cells.half
    below = _is_rounded_down(size, small, cells)
    size -= below
    inward = (size + cells.half) & (2 * cells.half - 1)
    outward = 2 * cells.half - inward
    inward += size < cells.half
    if cells.midpoints.size and small.any():
        at, middle = size[small], cells.midpoints.astype(np.int64)
        k = np.searchsorted(middle, at, side="right")
        outward[small] = middle[k] - at
        inward[small] = np.where(k > 0, at - middle[k - 1], at + middle[0] + 1)
    return np.maximum(outward - below, 1), np.maximum(inward + below, 1)


def _is_rounded_down(size: NDArray[np.int64], small: NDArray[np.bool_], cells: Cells) -> NDArray[np.bool_]:
    """Which magnitudes are midpoints whose even neighbour is the lower one."""
    even = (size & (4 * cells.half - 1)) == cells.half
    return np.where(small, np.isin(size, cells.midpoints[::2]), even) if cells.midpoints.size else even


def levels_of(patterns: NDArray[np.uint32], distance: NDArray[np.int64]) -> NDArray[np.uint16]:
    """How far the nearer border is, as a number, in quarter octaves. patterns: (n,) FP32 bits; distance: (n,) steps to it, at least 1."""
    exponents = np.maximum((patterns & _MAGNITUDE) >> np.uint32(_MANTISSA), np.uint32(1))
    logarithm = (distance.astype(np.float32).view(np.uint32) >> np.uint32(_MANTISSA - 2)) - np.uint32(127 << 2)
    found: NDArray[np.uint16] = (logarithm + (exponents << np.uint32(2))).astype(np.uint16)
    return found


def plain_levels(patterns: NDArray[np.uint32], cells: Cells) -> NDArray[np.uint16]:
    """`levels` in numpy alone: the reference."""
    return levels_of(patterns, np.minimum(*borders(patterns, cells)))


def levels(patterns: NDArray[np.uint32], cells: Cells) -> NDArray[np.uint16]:
    """The level of every weight, (n,); by a compiled kernel where that pays."""
    if patterns.size < _FAST_FROM:
        return plain_levels(patterns, cells)
    from pulse import kernels  # numba loads only when there is work for it

    found = np.empty(patterns.size, np.uint16)
    fixed = np.ascontiguousarray(patterns)[:]
    fixed.flags.writeable = False  # whatever it was: kernels are compiled anew for any other kind of memory
    kernels.levels(fixed, cells.drop, cells.least, cells.midpoints, found)
    return found
