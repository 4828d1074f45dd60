"""The interval that narrows with every decision, compiled: the pieces that all entropy coders share. `pulse.coder` explains them.

A writer's state is (low, width, words): the interval, and how many settled words `out` holds. A reader's is (code, width, at): what the
bytes name, less the writer's low, and where the next word begins. They are numbers that go in and come out, never objects: so that they
stay in registers. Kernels are kept on disk with the pieces compiled into them, by the time of their own file: after a change here, touch
the files of the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pulse import coder as plain
from pulse.kernels.compiled import piece

_ZERO, _ONE, _S8, _S16, _S32 = (np.uint64(n) for n in (0, 1, 8, 16, 32))
_LIMIT = np.uint64(1 << 32)
_FAST, _SLOW = np.int32(plain.FAST), np.int32(plain.SLOW)
_MOST, _SPAN = np.int32(plain.MOST), np.int32(plain.MOST - plain.LEAST)

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
def top_bit(value: Any) -> Any:
    """The place of the highest bit of a number that is not 0."""
    place = 0
    while value > _ONE:
        value >>= _ONE
        place += 1
    return place


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
def put(low: Any, width: Any, words: Any, out: Any, table: Any, context: Any, bit: Any) -> Any:
    """Write one decision in its context."""
    bound = (width >> _S16) * _of_zero(table, context)
    _learn(table, context, bit)
    mask = np.uint64(-np.int64(bit))
    return _narrow(low, words, out, bound & mask, bound + ((width - bound - bound) & mask))


@piece
def put_raw(low: Any, width: Any, words: Any, out: Any, value: Any, bits: Any) -> Any:
    """Write the lowest `bits` bits of a value as they are."""
    while bits > 0:
        now = (bits - 1) % 16 + 1
        bits -= now
        inner = width >> np.uint64(now)
        above = inner * ((value >> np.uint64(bits)) & ((_ONE << np.uint64(now)) - _ONE))
        low, width, words = _narrow(low, words, out, above, inner)
    return low, width, words


@piece
def put_number(low: Any, width: Any, words: Any, out: Any, value: Any) -> Any:
    """Write a number below 2^31 - 1."""
    length = top_bit(value + _ONE)
    low, width, words = put_raw(low, width, words, out, np.uint64(length), 5)
    return put_raw(low, width, words, out, value + _ONE, length)


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
def get(code: Any, width: Any, at: Any, data: Any, table: Any, context: Any) -> Any:
    """Read one decision."""
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
def get_raw(code: Any, width: Any, at: Any, data: Any, bits: Any) -> Any:
    """Read so many bits."""
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
def get_number(code: Any, width: Any, at: Any, data: Any) -> Any:
    """Read a number; what is none may come out as any below 2^32."""
    code, width, at, length = get_raw(code, width, at, data, 5)
    code, width, at, value = get_raw(code, width, at, data, np.int64(length))
    return code, width, at, (_ONE << length) + value - _ONE


@piece
def finished(code: Any, width: Any, at: Any, data: Any) -> Any:
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
