"""The values of a block as bytes: plain Python, and compiled kernels where those pay.

Contexts follow the block's typical move (`middle`, an FP32 exponent), never its largest one: one odd entry may be as large as it likes.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from pulse import value_coder
from pulse.codec.known import Known
from pulse.codec.moves import Moves, moves_of, places_of, values_of
from pulse.coder import finish
from pulse.errors import FormatError

MOST_MIDDLE = 255 + value_coder.PLACES
_ABOVE_ROWS = 4  # octaves from the middle up to the first row's
_ABOVE_TOPS = 24  # and up to the largest move that is written as one
_FAST_FROM = 1 << 10  # values from which the compiled coder pays, even if it must first be loaded


def encode(values: NDArray[np.float32], known: Known, digits: int) -> tuple[int, bytes, NDArray[np.float32]]:
    """The middle, the section, and the values that it carries, (n,). values: (n,), finite; digits: significant bits that are kept."""
    moves, sent = moves_of(values, known, digits)
    reach = known.exponents + places_of(moves.beyond.astype(np.int64))
    middle = _median(reach[moves.beyond != 0])
    rows, tops = _contexts(known, middle)
    difference = middle + _ABOVE_TOPS - reach
    moves = moves.only((difference >= 0) & (difference < value_coder.RAW), sent)
    return middle, _put(rows, tops, moves, digits), sent


def decode(section: memoryview, middle: int, known: Known, digits: int) -> NDArray[np.float32]:
    """The inverse: the values. `FormatError` for anything that `encode` would not have written, and for values that are not finite."""
    values = values_of(_get(section, *_contexts(known, middle), digits), known)
    if not np.isfinite(values).all():
        raise FormatError("the payload holds a value that is not finite")
    return values


def _median(reach: NDArray[np.int64]) -> int:
    half = reach.size // 2
    return int(np.partition(reach, half)[half]) if reach.size else 0


def _contexts(known: Known, middle: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """`pulse.value_coder`'s rows and tops."""
    rows = np.clip(middle + _ABOVE_ROWS - known.octaves, 0, value_coder.ROWS - 1).astype(np.uint8)
    return rows, (middle + _ABOVE_TOPS - known.exponents).astype(np.int32)


def _compiled_pays(size: int) -> bool:
    return size >= _FAST_FROM or "pulse.kernels" in sys.modules


def _put(rows: NDArray[np.uint8], tops: NDArray[np.int32], moves: Moves, digits: int) -> bytes:
    if not _compiled_pays(rows.size):
        return value_coder.encode(rows.tolist(), tops.tolist(), moves.far.tolist(), moves.beyond.tolist(), moves.raw.tolist(), digits)
    from pulse import kernels

    room = 2 * rows.size + 256
    while True:
        out, table = np.empty(room, np.uint32), value_coder.START.copy()
        low, width, words = kernels.encode_values(rows, tops, *moves, digits, table, out)
        if words != kernels.FULL:
            return finish(out[:words].astype(">u4").tobytes(), int(low), int(width))
        room *= 2


def _get(section: memoryview, rows: NDArray[np.uint8], tops: NDArray[np.int32], digits: int) -> Moves:
    if not _compiled_pays(rows.size):
        far, beyond, raw = value_coder.decode(bytes(section), rows.tolist(), tops.tolist(), digits)
        return Moves(np.array(far, np.uint8), np.array(beyond, np.uint32), np.array(raw, np.uint32))
    from pulse import kernels

    moves = Moves(np.empty(rows.size, np.uint8), np.empty(rows.size, np.uint32), np.empty(rows.size, np.uint32))
    code = np.frombuffer(section, np.uint8)
    if kernels.decode_values(code, rows, tops, digits, value_coder.START.copy(), *moves) != rows.size:
        raise FormatError(f"a block of {rows.size} values is malformed")
    return moves
