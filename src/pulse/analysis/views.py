"""Weights as a forward pass of lower precision would see them: casts by round to nearest even, in arithmetic on bits.

NaN is one number in a view, whatever its payload: a weight that was NaN and still is has not changed there. Overflow goes to infinity.
F8_E4M3 has none: what is too large for it becomes its largest number, as in PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.analysis.numbers import LAYOUTS

VIEWS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "F32": ("BF16", "F16", "F8_E4M3", "F8_E5M2"),
    "BF16": ("F8_E4M3", "F8_E5M2"),
    "F16": ("F8_E4M3", "F8_E5M2"),
})  # fmt: skip
_BLOCK = 1 << 16  # units cast at a time, so that what lies between the steps stays in the cache
_INFINITY = np.uint32(0x7F800000)


def narrow(bits: NDArray[np.uint32], view: str) -> NDArray[np.uint32]:
    """F32 patterns cast to BF16, F16, F8_E4M3 or F8_E5M2. (n,) uint32 in and out; every NaN becomes one pattern."""
    layout = LAYOUTS[view]
    sign = (bits >> np.uint32(31)) << np.uint32(layout.exponent + layout.mantissa)
    size = bits & np.uint32(0x7FFFFFFF)
    drop = 23 - layout.mantissa
    lowest = 127 - layout.bias + 1  # F32's exponent field of the smallest normal number of the view
    exponent = size >> np.uint32(23)
    normal = _rounded(size, np.uint32(drop)) - np.uint32((lowest - 1) << layout.mantissa)
    significand = (size & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    tiny = _rounded(significand, np.minimum(drop + np.maximum(lowest - exponent.astype(np.int64), 0), 31).astype(np.uint32))
    is_tiny = (exponent < lowest) & (lowest > 1)  # BF16's small numbers are F32's, shortened
    infinity = (1 << layout.exponent) - 1 << layout.mantissa
    highest, nan = (0x7E, 0x7F) if view == "F8_E4M3" else (infinity, infinity + 1)
    found = np.minimum(np.where(is_tiny, tiny, normal), np.uint32(highest))
    return np.where(size > _INFINITY, np.uint32(nan), found | sign)


def _rounded(numbers: NDArray[np.uint32], drop: Any) -> NDArray[np.uint32]:
    """Numbers without their lowest `drop` bits, rounded to nearest even."""
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    found: NDArray[np.uint32] = (numbers + half + ((numbers >> drop) & np.uint32(1))) >> drop
    return found


@cache
def _table(source: str, view: str) -> NDArray[np.uint32]:
    """The cast of each of 65536 patterns. For F32 these are its highest 16 bits, the last one set where any lower bit is set.

    That loses nothing for views of at most 6 significant bits (rounding to odd first: Boldo and Melquiond, 2008).
    """
    patterns = np.arange(1 << 16, dtype=np.uint32)
    if source == "F16":
        with np.errstate(invalid="ignore"):  # signalling NaNs are patterns too
            return narrow(patterns.astype("<u2").view("<f2").astype("<f4").view("<u4"), view)
    return narrow(patterns << np.uint32(16), view)


def cast(units: NDArray[Any], source: str, view: str) -> NDArray[np.uint32]:
    """Units of an F32, BF16 or F16 tensor in a view: `narrow`, by a table where one is exact. (n,) uint32."""
    if source == "F32" and LAYOUTS[view].mantissa > 3:
        return narrow(units, view)
    if source == "F32":
        odd = ((units & np.uint32(0xFFFF)) != 0).astype(np.uint32)
        units = (units >> np.uint32(16)) | odd
    found: NDArray[np.uint32] = _table(source, view)[units]
    return found


def visible(old: NDArray[Any], new: NDArray[Any], source: str, view: str) -> int:
    """How many of these units differ in a view. old, new: (n,) unsigned."""
    blocks = (slice(start, start + _BLOCK) for start in range(0, old.size, _BLOCK))
    return sum(int(np.count_nonzero(cast(old[block], source, view) != cast(new[block], source, view))) for block in blocks)
