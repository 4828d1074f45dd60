"""The entropy coder of the contextual encoding, compiled: the twin of `pulse.coder`, which explains it.

The two loops are written out: cut into functions they count references to arrays at every call, and take three times as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse import coder as plain
from pulse.kernels.compiled import compiled, piece

_ZERO, _ONE, _TWO, _S8, _S16, _S32 = (np.uint64(n) for n in (0, 1, 2, 8, 16, 32))
_LIMIT, _WORD = np.uint64(1 << 32), np.uint64((1 << 32) - 1)
_FAST, _SLOW, _MEAN = np.int32(plain.FAST), np.int32(plain.SLOW), plain.MEAN
_MOST, _SPAN = np.int32(plain.MOST), np.int32(plain.MOST - plain.LEAST)
_GAP, _ESCAPE, _STEP, _STEPS_AT, _NEXT_AT = plain.GAP, plain.ESCAPE, plain.STEP, plain.STEPS_AT, plain.NEXT_AT
_ROOM = 48  # words that one change can take at most, and more

FULL, MALFORMED = -1, -2  # what a kernel returns in place of a count


@piece
def _learn(table: Any, context: Any, bit: Any) -> None:
    seen = _MOST - np.int32(bit) * _SPAN
    fast, slow = np.int32(table[context, 0]), np.int32(table[context, 1])
    table[context, 0] = np.uint16(fast + ((seen - fast) >> _FAST))
    table[context, 1] = np.uint16(slow + ((seen - slow) >> _SLOW))


@piece
def _of_zero(table: Any, context: Any) -> Any:
    return (np.uint64(table[context, 0]) + np.uint64(table[context, 1])) >> _ONE


@piece
def _length(value: Any) -> Any:
    """The place of the highest bit of a number that is not 0."""
    place = 0
    while value > _ONE:
        value >>= _ONE
        place += 1
    return place


@piece
def _octave(mean: Any, near: Any) -> Any:
    """`_length`, from a guess that is seldom far off."""
    while (mean >> np.uint64(near)) > _ONE:
        near += 1
    while (mean >> np.uint64(near)) == _ZERO:
        near -= 1
    return near


@piece
def _followed(mean: Any, gap: Any) -> Any:
    old = np.int64(mean)
    return np.uint64(max(1, old + ((np.int64(gap << _S8) - old) >> _MEAN)))


@piece
def _narrow(low: Any, words: Any, out: Any, above: Any, inner: Any) -> Any:
    """Go on with the part `inner` wide that begins `above` over `low`; a settled word leaves into `out`."""
    moved = low + above
    if moved < low:  # a carry into the words that are settled already
        at = words - 1
        out[at] += np.uint32(1)
        while out[at] == 0:
            at -= 1
            out[at] += np.uint32(1)
    if inner < _LIMIT:
        out[words] = np.uint32(moved >> _S32)
        return moved << _S32, inner << _S32, words + 1
    return moved, inner, words


@piece
def _put(low: Any, width: Any, words: Any, out: Any, table: Any, context: Any, bit: Any) -> Any:
    bound = (width >> _S16) * _of_zero(table, context)
    _learn(table, context, bit)
    mask = np.uint64(-np.int64(bit))
    return _narrow(low, words, out, bound & mask, bound + ((width - bound - bound) & mask))


@piece
def _put_raw(low: Any, width: Any, words: Any, out: Any, value: Any, bits: Any) -> Any:
    while bits > 0:
        now = (bits - 1) % 16 + 1
        bits -= now
        inner = width >> np.uint64(now)
        above = inner * ((value >> np.uint64(bits)) & ((_ONE << np.uint64(now)) - _ONE))
        low, width, words = _narrow(low, words, out, above, inner)
    return low, width, words


@piece
def _put_number(low: Any, width: Any, words: Any, out: Any, value: Any) -> Any:
    length = _length(value + _ONE)
    low, width, words = _put_raw(low, width, words, out, np.uint64(length), 5)
    return _put_raw(low, width, words, out, value + _ONE, length)


@compiled
def encode(  # noqa: C901  see above
    ranks: NDArray[np.uint32],
    folded: NDArray[np.uint64],
    starts: NDArray[np.int64],
    means: NDArray[np.uint64],
    check: np.uint64,
    table: NDArray[np.uint16],
    out: NDArray[np.uint32],
) -> tuple[np.uint64, np.uint64, int]:
    """See `pulse.coder.encode`. table: a copy of `START`, used up; out: room for words.

    Returns the interval's low end and width and the number of words before it, or `FULL` for that if `out` is too small.
    """
    low, width, words = _ZERO, ~_ZERO, 0
    for c in range(starts.size - 1):
        if words + _ROOM > out.size:
            return low, width, FULL
        low, width, words = _put_number(low, width, words, out, np.uint64(starts[c + 1] - starts[c]))
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
                low, width, words = _put(low, width, words, out, table, context + place, 1)
            if high < _ESCAPE:
                low, width, words = _put(low, width, words, out, table, context + high, 0)
            else:
                low, width, words = _put_number(low, width, words, out, np.uint64(high - _ESCAPE))
            if few > 0:
                bit = np.int64((gap >> np.uint64(few - 1)) & _ONE)
                low, width, words = _put(low, width, words, out, table, context + _GAP - 1, bit)
                low, width, words = _put_raw(low, width, words, out, gap, few - 1)
            mean = _followed(mean, gap)
            sign = folded[j] & _ONE
            size = (folded[j] >> _ONE) + sign
            top = _length(size)
            for place in range(top):
                low, width, words = _put(low, width, words, out, table, steps_at + place, 1)
            if top < _STEP - 1:
                low, width, words = _put(low, width, words, out, table, steps_at + top, 0)
            low, width, words = _put_raw(low, width, words, out, sign, 1)
            if top > 0:
                bit = np.int64((size >> np.uint64(top - 1)) & _ONE)
                low, width, words = _put(low, width, words, out, table, _NEXT_AT + top, bit)
                low, width, words = _put_raw(low, width, words, out, size, top - 1)
    if words + _ROOM > out.size:
        return low, width, FULL
    low, width, words = _put_raw(low, width, words, out, check, 32)
    return low, width, words


@piece
def _shrink(code: Any, at: Any, data: Any, above: Any, inner: Any) -> Any:
    code -= above
    if inner < _LIMIT:
        word = _ZERO
        for i in range(at, at + 4):
            word = (word << _S8) | (np.uint64(data[i]) if i < data.size else _ZERO)
        return (code << _S32) | word, inner << _S32, at + 4
    return code, inner, at


@piece
def _get(code: Any, width: Any, at: Any, data: Any, table: Any, context: Any) -> Any:
    # Without a branch, since nobody can foretell a well coded bit: three times as fast.
    fast, slow = np.int32(table[context, 0]), np.int32(table[context, 1])
    bound = (width >> _S16) * (np.uint64(fast + slow) >> _ONE)
    bit = np.int64(code >= bound)
    mask = np.uint64(-bit)
    seen = _MOST - np.int32(bit) * _SPAN
    table[context, 0] = np.uint16(fast + ((seen - fast) >> _FAST))
    table[context, 1] = np.uint16(slow + ((seen - slow) >> _SLOW))
    code, width, at = _shrink(code, at, data, bound & mask, bound + ((width - bound - bound) & mask))
    return code, width, at, bit


@piece
def _get_raw(code: Any, width: Any, at: Any, data: Any, bits: Any) -> Any:
    value = _ZERO
    while bits > 0:
        now = (bits - 1) % 16 + 1
        bits -= now
        inner = width >> np.uint64(now)
        found = min(code // inner, (_ONE << np.uint64(now)) - _ONE)
        code, width, at = _shrink(code, at, data, inner * found, inner)
        value = (value << np.uint64(now)) | found
    return code, width, at, value


@piece
def _get_number(code: Any, width: Any, at: Any, data: Any) -> Any:
    code, width, at, length = _get_raw(code, width, at, data, 5)
    code, width, at, value = _get_raw(code, width, at, data, np.int64(length))
    return code, width, at, (_ONE << length) + value - _ONE


@piece
def _finished(code: Any, width: Any, at: Any, data: Any) -> Any:
    """Whether the bytes end where the writer's do, and name the number that it chooses."""
    if at < data.size or (data.size > 0 and data[data.size - 1] == 0):
        return False
    last = _ZERO
    for i in range(at - 8, at):
        last = (last << _S8) | (np.uint64(data[i]) if i < data.size else _ZERO)
    low = last - code
    rest = ~_ZERO
    while (((low + rest) & ~rest) - low) >= width:  # modulo 2^64, as a carry into settled words is
        rest >>= _S8
    return ((low + rest) & ~rest) == last


@compiled
def decode(  # noqa: C901  see above
    data: NDArray[np.uint8],
    means: NDArray[np.uint64],
    size: np.uint64,
    highest: np.uint64,
    table: NDArray[np.uint16],
    ranks: NDArray[np.uint32],
    folded: NDArray[np.uint64],
    starts: NDArray[np.int64],
) -> tuple[np.uint64, int]:
    """See `pulse.coder.decode`. Fills ranks and folded (count,) and starts (classes + 1,).

    Returns the check, and how many changes were found, or `MALFORMED` for that.
    """
    code, width, at = _ZERO, ~_ZERO, 8
    for i in range(8):
        code = (code << _S8) | (np.uint64(data[i]) if i < data.size else _ZERO)
    j = 0
    starts[0] = 0
    for c in range(starts.size - 1):
        code, width, at, number = _get_number(code, width, at, data)
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
                code, width, at, bit = _get(code, width, at, data, table, context + high)
                if bit == 0:
                    break
                high += 1
            gap = np.uint64(high)
            if high == _ESCAPE:
                code, width, at, more = _get_number(code, width, at, data)
                gap += more
            if few > 0:
                code, width, at, bit = _get(code, width, at, data, table, context + _GAP - 1)
                code, width, at, rest = _get_raw(code, width, at, data, few - 1)
                gap = (((gap << _ONE) | np.uint64(bit)) << np.uint64(few - 1)) | rest
            top = 0
            while top < _STEP - 1:
                code, width, at, bit = _get(code, width, at, data, table, steps_at + top)
                if bit == 0:
                    break
                top += 1
            code, width, at, sign = _get_raw(code, width, at, data, 1)
            step = _ONE
            if top > 0:
                code, width, at, bit = _get(code, width, at, data, table, _NEXT_AT + top)
                code, width, at, rest = _get_raw(code, width, at, data, top - 1)
                step = ((_TWO | np.uint64(bit)) << np.uint64(top - 1)) | rest
            if gap > _WORD or following + gap >= size or step > (highest >> _ONE) + sign:
                return _ZERO, MALFORMED
            ranks[j] = np.uint32(following + gap)
            folded[j] = (step << _ONE) - sign
            following += gap + _ONE
            mean = _followed(mean, gap)
            j += 1
        starts[c + 1] = j
    code, width, at, check = _get_raw(code, width, at, data, 32)
    return check, j if _finished(code, width, at, data) else MALFORMED
