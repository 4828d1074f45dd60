"""What the bits of a float mean: its exponent class, its magnitude, the distance to its neighbour.

Only reports are made from these; nothing here decides what travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.bits import DTYPES, DType

PATTERNS = 1 << 16  # the highest 16 bits of a wider float; all bits of a narrower one


@dataclass(frozen=True, slots=True)
class Layout:
    """How a float is put together: a sign, `exponent` bits that mean a power of two above -`bias`, `mantissa` bits."""

    exponent: int
    mantissa: int
    bias: int

    @property
    def classes(self) -> int:
        """How many values the exponent field has."""
        return 1 << self.exponent


LAYOUTS: Mapping[str, Layout] = MappingProxyType({
    "F64": Layout(11, 52, 1023),
    "F32": Layout(8, 23, 127),
    "BF16": Layout(8, 7, 127),
    "F16": Layout(5, 10, 15),
    "F8_E4M3": Layout(4, 3, 7),
    "F8_E5M2": Layout(5, 2, 15),
    "F8_E4M3FNUZ": Layout(4, 3, 8),
    "F8_E5M2FNUZ": Layout(5, 2, 16),
})  # fmt: skip


def class_count(dtype: DType) -> int:
    """How many exponent classes a dtype has; everything but floats has one."""
    return LAYOUTS[dtype.name].classes if dtype.is_float else 1


def classes_of(units: NDArray[Any], dtype: DType) -> NDArray[np.int64]:
    """The exponent field of every unit. units: (n,) unsigned; (n,) int64, zeros for what is no float."""
    if not dtype.is_float:
        return np.zeros(units.shape, np.int64)
    layout = LAYOUTS[dtype.name]
    field: NDArray[Any] = (units >> units.dtype.type(layout.mantissa)) & units.dtype.type(layout.classes - 1)
    return field.astype(np.int64)


@cache
def class_of_pattern(name: str) -> NDArray[np.int64]:
    """The exponent class of each of the highest-16-bit patterns of a dtype. (65536,) int64."""
    dtype = DTYPES[name]
    return classes_of(_widened(dtype), dtype)


@cache
def magnitude_of_pattern(name: str) -> NDArray[np.float64]:
    """|w| of each of the highest-16-bit patterns of a float dtype, what lies below cut off. (65536,) float64 with infinities and NaN."""
    dtype = DTYPES[name]
    units = _widened(dtype)
    if dtype.name == "BF16":
        units, dtype = units.astype("<u4") << np.uint32(16), DTYPES["F32"]
    if dtype.width > 1:
        with np.errstate(invalid="ignore"):  # signalling NaNs are patterns too
            return np.abs(units.view(f"<f{dtype.width}").astype(np.float64))
    return _magnitude_of_byte(units, dtype)


def _magnitude_of_byte(units: NDArray[Any], dtype: DType) -> NDArray[np.float64]:
    layout = LAYOUTS[dtype.name]
    exponent, mantissa = classes_of(units, dtype), (units & ((1 << layout.mantissa) - 1)).astype(np.int64)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << layout.mantissa))
    value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - layout.bias - layout.mantissa)
    if dtype.name.endswith("FNUZ"):
        return np.where(units == 0x80, np.nan, value)
    if dtype.name == "F8_E4M3":
        return np.where((units & 0x7F) == 0x7F, np.nan, value)
    top = exponent == layout.classes - 1
    return np.where(top & (mantissa == 0), np.inf, np.where(top, np.nan, value))


def _widened(dtype: DType) -> NDArray[Any]:
    """A unit with each of the patterns on top; bytes repeat."""
    patterns = np.arange(PATTERNS, dtype=np.uint64)
    return (patterns << np.uint64(max(0, 8 * dtype.width - 16))).astype(dtype.unsigned)


def plain_count_patterns(flat: NDArray[Any], counts: NDArray[np.int64]) -> None:
    """Add to `counts` how often each of the highest-16-bit patterns occurs. flat: (units,) unsigned; counts: (65536,)."""
    top = flat >> flat.dtype.type(max(0, 8 * flat.dtype.itemsize - 16))
    counts[:] += np.bincount(top.astype(np.int64), minlength=PATTERNS)


def ulp(magnitudes: NDArray[np.float64], view: str) -> NDArray[np.float64]:
    """The distance from |w| to the next larger number of a view: 2^(e - mantissa bits). (n,) float64, finite in and out."""
    layout = LAYOUTS[view]
    exponent = np.frexp(magnitudes)[1].astype(np.int64) - 1
    lowest = 1 - layout.bias
    found: NDArray[np.float64] = np.ldexp(1.0, np.where(magnitudes == 0, lowest, np.maximum(exponent, lowest)) - layout.mantissa)
    return found
