"""Planes of weights that are stored whole: their bytes do not repeat, but few of them are frequent.

The highest byte of a BF16 weight, the sign and most of the exponent, carries under three bits of information, the lowest one eight. An
entropy coder takes that; a search for matches only gets in its way, since every match that it finds by chance costs more than the
literals it replaces. zstd codes literals by Huffman, so this is zstd with next to no search: any zstd reads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from pulse.bits import DType
from pulse.codec.sections import pack

# Long matches alone, from a table of 64 entries: still enough for runs and for periods, as in biases and masks. On BF16 weights smaller
# than any level of zstd, and twice as fast as level 1 (docs/log.md).
_LITERALS = zstandard.ZstdCompressionParameters(strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7)


def pack_whole(units: NDArray[Any], dtype: DType) -> list[bytes]:
    """Sections for the units of a tensor, unsigned, as `sections.pack_planes` makes them, and read by `sections.unpack_planes`."""
    highest = int(units.max()) if units.size else 0
    planes = ((units >> 8 * i).astype(np.uint8).tobytes() for i in range((highest.bit_length() + 7) // 8))
    return [_pack(plane) if dtype.is_float else pack(plane) for plane in planes]


def _pack(data: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(compression_params=_LITERALS).compress(data)
    return packed if len(packed) < len(data) else data
