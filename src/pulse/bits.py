"""Tensors as bits: the only place that knows widths, dtype codes and the order of bit patterns.

Everything on the wire side moves unsigned integers, never floats: NaN equals itself, -0.0 differs from 0.0, and every dtype that
safetensors knows works, because nothing here depends on what the bits mean. The one exception, `to_key`, is a bijection on all
patterns, so that it cannot lose anything either.

A *unit* is what a position counts: one element of 1, 2, 4 or 8 bytes. Packed types (F4, F6) are counted in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.errors import FormatError

MAX_DIMENSIONS = 64  # numpy's and torch's own limit
MAX_ELEMENTS = 1 << 60  # so that every size in bytes and every position fits 64 bits, signed
UNSIGNED: Mapping[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype: `bits` per element, the `width` of a unit in bytes, and for floats, how many bits of a pattern are `mantissa`."""

    name: str
    bits: int
    width: int
    mantissa: int | None = None

    @property
    def is_float(self) -> bool:
        """Whether patterns are ordered as floats are."""
        return self.mantissa is not None

    @property
    def unsigned(self) -> np.dtype[Any]:
        """The little-endian unsigned numpy dtype of a unit."""
        return UNSIGNED[self.width]


def _dtypes() -> dict[str, DType]:
    floats = {"F64": (64, 52), "F32": (32, 23), "F16": (16, 10), "BF16": (16, 7)}
    floats |= {"F8_E4M3": (8, 3), "F8_E4M3FNUZ": (8, 3), "F8_E5M2": (8, 2), "F8_E5M2FNUZ": (8, 2)}
    plain = {"BOOL": 8, "I8": 8, "U8": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64}
    packed = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    return (
        {name: DType(name, bits, bits // 8, mantissa) for name, (bits, mantissa) in floats.items()}
        | {name: DType(name, bits, bits // 8) for name, bits in plain.items()}
        | {name: DType(name, bits, 1) for name, bits in packed.items()}
    )


DTYPES: Mapping[str, DType] = MappingProxyType(_dtypes())


def dtype_of(name: str) -> DType:
    """The dtype with that safetensors code; `FormatError` if there is none."""
    if name not in DTYPES:
        raise FormatError(f"unknown dtype {name[:40]!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor is, without its bits. `FormatError` for a shape that no array library could hold."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_DIMENSIONS:
            raise FormatError(f"a shape of {len(self.shape)} dimensions; {MAX_DIMENSIONS} are possible")
        if math.prod(max(size, 1) for size in self.shape) > MAX_ELEMENTS:
            raise FormatError(f"{self}: more than {MAX_ELEMENTS} elements")

    @property
    def nbytes(self) -> int:
        """Size of the bits in bytes. `FormatError` for a packed tensor that does not fill its last byte."""
        bits = math.prod(self.shape) * dtype_of(self.dtype).bits
        if bits % 8:
            raise FormatError(f"{self}: {bits} bits do not fill whole bytes")
        return bits // 8

    @property
    def units(self) -> int:
        """How many positions there are."""
        return self.nbytes // dtype_of(self.dtype).width

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, eq=False)
class TensorBits:  # noqa: PLW1641  arrays have no hash
    """A tensor as bits: dtype code, shape, and the units in row-major order.

    flat: (units,) unsigned integers of the dtype's width; treat as read only.
    """

    dtype: str
    shape: tuple[int, ...]
    flat: NDArray[Any]

    def __post_init__(self) -> None:
        spec = self.spec
        if self.flat.dtype != dtype_of(self.dtype).unsigned or self.flat.shape != (spec.units,):
            found = f"{self.flat.shape} {self.flat.dtype}"
            raise FormatError(f"{spec} needs {spec.units} units of {dtype_of(self.dtype).unsigned}, not {found}")

    @property
    def spec(self) -> Spec:
        """The dtype and shape."""
        return Spec(self.dtype, self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorBits):
            return NotImplemented
        return self.spec == other.spec and np.array_equal(self.flat, other.flat)

    def copy(self) -> TensorBits:
        """A copy whose units nobody else holds."""
        return TensorBits(self.dtype, self.shape, self.flat.copy())


def to_key(units: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Bit patterns (any shape, unsigned) mapped so that neighbouring values of the dtype get neighbouring numbers.

    For a float of w bits, the pattern read as a signed integer s goes to s XOR ((s >> (w-1)) AND (2^(w-1) - 1)): a bijection on all
    patterns, its own inverse, monotone on finite values (+0 -> 0, -0 -> -1). Other dtypes map to themselves.
    """
    if not dtype.is_float:
        return units
    signed = units.view(f"<i{dtype.width}")
    low = signed.dtype.type((1 << (8 * dtype.width - 1)) - 1)
    key: NDArray[Any] = signed ^ ((signed >> (8 * dtype.width - 1)) & low)
    return key.view(dtype.unsigned)


from_key = to_key  # its own inverse


def steps_between(old: NDArray[Any], new: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """How many representable numbers lie from `old` to `new`, modulo 2^w, as unsigned units of the same width."""
    steps: NDArray[Any] = to_key(new, dtype) - to_key(old, dtype)
    return steps


def advance(old: NDArray[Any], steps: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """The inverse of `steps_between`: the bits that lie `steps` away from `old`."""
    return from_key(to_key(old, dtype) + steps, dtype)
