"""The values of a payload, compiled: the twin of `pulse.value_coder`, which explains them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse import value_coder as plain
from pulse.kernels.compiled import compiled, piece
from pulse.kernels.interval import FULL, MALFORMED, finished, get, get_raw, put, put_raw, top_bit

_ZERO, _ONE, _TWO, _S8 = (np.uint64(n) for n in (0, 1, 2, 8))
_TREE, _RAW, _FAR_AT, _NEXT_AT, _PLACES, _MANTISSA = plain.TREE, plain.RAW, plain.FAR_AT, plain.NEXT_AT, plain.PLACES, plain.MANTISSA
_ROOM = 16  # words that one value can take at most, and more


@piece
def _dropped(place: Any, digits: Any) -> Any:
    return max(min(place + 1, _MANTISSA) - digits, 0)


@compiled
def encode_values(
    rows: NDArray[np.uint8],
    tops: NDArray[np.int32],
    far: NDArray[np.uint8],
    beyond: NDArray[np.uint32],
    raw: NDArray[np.uint32],
    digits: int,
    table: NDArray[np.uint16],
    out: NDArray[np.uint32],
) -> tuple[np.uint64, np.uint64, int]:
    """See `pulse.value_coder.encode`. table: a copy of `START`, used up; out: room for words.

    Returns the interval's low end and width and the number of words before it, or `FULL` for that if `out` is too small.
    """
    low, width, words = _ZERO, ~_ZERO, 0
    for j in range(rows.size):
        if words + _ROOM > out.size:
            return low, width, FULL
        number, row, node = np.uint64(beyond[j]), np.int64(rows[j]), 1
        place = top_bit(number)
        difference = np.int64(tops[j]) - place if number > _ZERO else _RAW
        for level in range(6):
            bit = (difference >> (5 - level)) & 1
            low, width, words = put(low, width, words, out, table, row * _TREE + node, bit)
            node = 2 * node + bit
        if number == _ZERO:
            low, width, words = put_raw(low, width, words, out, np.uint64(raw[j]), 32)
            continue
        low, width, words = put(low, width, words, out, table, _FAR_AT + row, np.int64(far[j]))
        bits = place - _dropped(place, digits)
        if bits > 0:
            context, rest = _NEXT_AT + 4 * difference, number >> np.uint64(place - bits)
            bit = np.int64((rest >> np.uint64(bits - 1)) & _ONE)
            low, width, words = put(low, width, words, out, table, context, bit)
            if bits > 1:
                below = np.int64((rest >> np.uint64(bits - 2)) & _ONE)
                low, width, words = put(low, width, words, out, table, context + 1 + bit, below)
                low, width, words = put_raw(low, width, words, out, rest, bits - 2)
    return low, width, words


@compiled
def decode_values(
    data: NDArray[np.uint8],
    rows: NDArray[np.uint8],
    tops: NDArray[np.int32],
    digits: int,
    table: NDArray[np.uint16],
    far: NDArray[np.uint8],
    beyond: NDArray[np.uint32],
    raw: NDArray[np.uint32],
) -> int:
    """See `pulse.value_coder.decode`. Fills far, beyond and raw, (n,); returns n, or `MALFORMED`."""
    code, width, at = _ZERO, ~_ZERO, 8
    for i in range(8):
        code = (code << _S8) | (np.uint64(data[i]) if i < data.size else _ZERO)
    for j in range(rows.size):
        row, node = np.int64(rows[j]), 1
        for _ in range(6):
            code, width, at, bit = get(code, width, at, data, table, row * _TREE + node)
            node = 2 * node + bit
        difference = node - _TREE
        far[j], beyond[j], raw[j] = 0, 0, 0
        if difference == _RAW:
            code, width, at, value = get_raw(code, width, at, data, 32)
            raw[j] = np.uint32(value)
            continue
        place = np.int64(tops[j]) - difference
        if place < 0 or place >= _PLACES:
            return MALFORMED
        code, width, at, bit = get(code, width, at, data, table, _FAR_AT + row)
        far[j] = np.uint8(bit)
        context, bits, number = _NEXT_AT + 4 * difference, place - _dropped(place, digits), _ONE
        if bits > 0:
            code, width, at, bit = get(code, width, at, data, table, context)
            number = _TWO | np.uint64(bit)
        if bits > 1:
            code, width, at, below = get(code, width, at, data, table, context + 1 + bit)
            code, width, at, rest = get_raw(code, width, at, data, bits - 2)
            number = (((number << _ONE) | np.uint64(below)) << np.uint64(bits - 2)) | rest
        beyond[j] = np.uint32(number << np.uint64(place - bits))
    return rows.size if finished(code, width, at, data) else MALFORMED
