"""The entropy coder of the contextual encoding, compiled: the twin of `pulse.coder`, which explains it.

The two loops are written out: cut into functions they count references to arrays at every call, and take three times as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse import coder as plain
from pulse.kernels.compiled import compiled, piece
from pulse.kernels.interval import FULL, MALFORMED, finished, get, get_number, get_raw, put, put_number, put_raw, top_bit

_ZERO, _ONE, _TWO, _S8 = (np.uint64(n) for n in (0, 1, 2, 8))
_WORD, _MEAN = np.uint64((1 << 32) - 1), plain.MEAN
_GAP, _ESCAPE, _STEP, _STEPS_AT, _NEXT_AT = plain.GAP, plain.ESCAPE, plain.STEP, plain.STEPS_AT, plain.NEXT_AT
_ROOM = 48  # words that one change can take at most, and more


@piece
def _octave(mean: Any, near: Any) -> Any:
    """`top_bit`, from a guess that is seldom far off."""
    while (mean >> np.uint64(near)) > _ONE:
        near += 1
    while (mean >> np.uint64(near)) == _ZERO:
        near -= 1
    return near


@piece
def _followed(mean: Any, gap: Any) -> Any:
    old = np.int64(mean)
    return np.uint64(max(1, old + ((np.int64(gap << _S8) - old) >> _MEAN)))


@compiled
def encode(  # noqa: C901, PLR0912  see above
    ranks: NDArray[np.uint32],
    folded: NDArray[np.uint64],
    starts: NDArray[np.int64],
    means: NDArray[np.uint64],
    check: np.uint64,
    table: NDArray[np.uint16],
    out: NDArray[np.uint32],
) -> tuple[np.uint64, np.uint64, int]:
    """See `pulse.coder.encode`. folded: (changes,), or (0,) for ranks alone. table: a copy of `START`, used up; out: room for words.

    Returns the interval's low end and width and the number of words before it, or `FULL` for that if `out` is too small.
    """
    low, width, words = _ZERO, ~_ZERO, 0
    for c in range(starts.size - 1):
        if words + _ROOM > out.size:
            return low, width, FULL
        low, width, words = put_number(low, width, words, out, np.uint64(starts[c + 1] - starts[c]))
        following, mean, octave = np.uint64(0), means[c], 8
        steps_at = _STEPS_AT + c * _STEP
        for j in range(starts[c], starts[c + 1]):
            if words + _ROOM > out.size:
                return low, width, FULL
            gap = np.uint64(ranks[j]) - following
            following = np.uint64(ranks[j]) + _ONE
            octave = _octave(mean, octave)
            context = (4 * octave + np.int64(((mean << _TWO) >> np.uint64(octave)) & np.uint64(3))) * _GAP
            few = max(0, octave - 8)
            high = np.int64(gap >> np.uint64(few))
            for place in range(min(high, _ESCAPE)):
                low, width, words = put(low, width, words, out, table, context + place, 1)
            if high < _ESCAPE:
                low, width, words = put(low, width, words, out, table, context + high, 0)
            else:
                low, width, words = put_number(low, width, words, out, np.uint64(high - _ESCAPE))
            if few > 0:
                bit = np.int64((gap >> np.uint64(few - 1)) & _ONE)
                low, width, words = put(low, width, words, out, table, context + _GAP - 1, bit)
                low, width, words = put_raw(low, width, words, out, gap, few - 1)
            mean = _followed(mean, gap)
            if folded.size == 0:
                continue
            sign = folded[j] & _ONE
            size = (folded[j] >> _ONE) + sign
            top = top_bit(size)
            for place in range(top):
                low, width, words = put(low, width, words, out, table, steps_at + place, 1)
            if top < _STEP - 1:
                low, width, words = put(low, width, words, out, table, steps_at + top, 0)
            low, width, words = put_raw(low, width, words, out, sign, 1)
            if top > 0:
                bit = np.int64((size >> np.uint64(top - 1)) & _ONE)
                low, width, words = put(low, width, words, out, table, _NEXT_AT + top, bit)
                low, width, words = put_raw(low, width, words, out, size, top - 1)
    if words + _ROOM > out.size:
        return low, width, FULL
    low, width, words = put_raw(low, width, words, out, check, 32)
    return low, width, words


@compiled
def decode(  # noqa: C901, PLR0912  see above
    data: NDArray[np.uint8],
    means: NDArray[np.uint64],
    size: np.uint64,
    highest: np.uint64,
    table: NDArray[np.uint16],
    ranks: NDArray[np.uint32],
    folded: NDArray[np.uint64],
    starts: NDArray[np.int64],
) -> tuple[np.uint64, int]:
    """See `pulse.coder.decode`. Fills ranks and folded (count,) and starts (classes + 1,); no folded if highest is 0.

    Returns the check, and how many changes were found, or `MALFORMED` for that.
    """
    code, width, at = _ZERO, ~_ZERO, 8
    for i in range(8):
        code = (code << _S8) | (np.uint64(data[i]) if i < data.size else _ZERO)
    j = 0
    starts[0] = 0
    for c in range(starts.size - 1):
        code, width, at, number = get_number(code, width, at, data)
        if number > np.uint64(ranks.size - j):
            return _ZERO, MALFORMED
        following, mean, octave = _ZERO, means[c], 8
        steps_at = _STEPS_AT + c * _STEP
        for _ in range(np.int64(number)):
            octave = _octave(mean, octave)
            context = (4 * octave + np.int64(((mean << _TWO) >> np.uint64(octave)) & np.uint64(3))) * _GAP
            few = max(0, octave - 8)
            high, bit = 0, 1
            while high < _ESCAPE:
                code, width, at, bit = get(code, width, at, data, table, context + high)
                if bit == 0:
                    break
                high += 1
            gap = np.uint64(high)
            if high == _ESCAPE:
                code, width, at, more = get_number(code, width, at, data)
                gap += more
            if few > 0:
                code, width, at, bit = get(code, width, at, data, table, context + _GAP - 1)
                code, width, at, rest = get_raw(code, width, at, data, few - 1)
                gap = (((gap << _ONE) | np.uint64(bit)) << np.uint64(few - 1)) | rest
            if gap > _WORD or following + gap >= size:
                return _ZERO, MALFORMED
            ranks[j] = np.uint32(following + gap)
            following += gap + _ONE
            mean = _followed(mean, gap)
            j += 1
            if highest == _ZERO:
                continue
            top = 0
            while top < _STEP - 1:
                code, width, at, bit = get(code, width, at, data, table, steps_at + top)
                if bit == 0:
                    break
                top += 1
            code, width, at, sign = get_raw(code, width, at, data, 1)
            step = _ONE
            if top > 0:
                code, width, at, bit = get(code, width, at, data, table, _NEXT_AT + top)
                code, width, at, rest = get_raw(code, width, at, data, top - 1)
                step = ((_TWO | np.uint64(bit)) << np.uint64(top - 1)) | rest
            if step > (highest >> _ONE) + sign:
                return _ZERO, MALFORMED
            folded[j - 1] = (step << _ONE) - sign
        starts[c + 1] = j
    code, width, at, check = get_raw(code, width, at, data, 32)
    return check, j if finished(code, width, at, data) else MALFORMED
