"""Streams of numbers as compressed byte planes.

An array of w-byte units becomes w planes: all lowest bytes, then all next bytes, and so on. Each plane is one section: a zstd frame,
or the bytes as they are where zstd saves nothing (then the stored size equals the raw size, and that is how the reader knows).
Planes at the top that are all zero are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from pulse.errors import FormatError

LEVEL = 1  # higher levels gain under 3 % on gaps and steps and cost several times the time


def pack(data: bytes) -> bytes:
    """One section for these bytes."""
    packed = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)
    return packed if len(packed) < len(data) else data


def unpack(stored: bytes | memoryview, raw_size: int, what: str) -> bytes:
    """The `raw_size` bytes of a section. Never allocates more than that; `FormatError` if it holds anything else."""
    if len(stored) == raw_size:
        return bytes(stored)
    if len(stored) > raw_size:
        raise FormatError(f"{what}: {len(stored)} stored bytes for {raw_size} raw ones")
    try:
        parameters = zstandard.get_frame_parameters(stored)
        if parameters.content_size != raw_size:
            raise FormatError(f"{what}: holds {parameters.content_size} bytes, {raw_size} expected")
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"{what}: not a zstd frame of {raw_size} bytes: {error}") from error
    if len(data) != raw_size:
        raise FormatError(f"{what}: {len(data)} bytes, {raw_size} expected")
    return data


def pack_planes(units: NDArray[Any]) -> list[bytes]:
    """Sections for an unsigned array, lowest plane first, without the zero planes at the top."""
    width = units.dtype.itemsize
    planes = np.ascontiguousarray(units).view(np.uint8).reshape(-1, width)
    highest = int(units.max()) if units.size else 0
    used = (highest.bit_length() + 7) // 8
    return [pack(planes[:, i].tobytes()) for i in range(used)]


def unpack_planes(stored: Sequence[bytes | memoryview], count: int, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """The `count` units of that unsigned dtype which `pack_planes` made these sections from."""
    if len(stored) > dtype.itemsize:
        raise FormatError(f"{what}: {len(stored)} planes for units of {dtype.itemsize} bytes")
    planes = np.zeros((count, dtype.itemsize), np.uint8)
    for i, section in enumerate(stored):
        planes[:, i] = np.frombuffer(unpack(section, count, f"{what}, plane {i}"), np.uint8)
    return planes.reshape(-1).view(dtype)


def zigzag(steps: NDArray[Any]) -> NDArray[Any]:
    """Steps modulo 2^w, read as signed, folded so that small ones of either sign are small numbers."""
    width = steps.dtype.itemsize
    signed = steps.view(f"<i{width}")
    return ((signed << 1) ^ (signed >> (8 * width - 1))).view(steps.dtype)


def unzigzag(folded: NDArray[Any]) -> NDArray[Any]:
    """The inverse of `zigzag`."""
    one = folded.dtype.type(1)
    sign = (folded & one).view(f"<i{folded.dtype.itemsize}")
    steps: NDArray[Any] = (folded >> one) ^ (-sign).view(folded.dtype)
    return steps
