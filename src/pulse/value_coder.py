"""How the values of a payload are written, in plain Python: the reference that a compiled kernel is proven equal to.

An entry of a payload says how far a weight moves: over which border of its view's cell, the nearer or the farther one, and how many
representable FP32 numbers beyond it, counted from 1. What both sides know of the weight picks the contexts (`pulse.coder` explains those):

* `row`, 0 to 11: about how many octaves the nearer border lies under the block's typical move.
* `top`: the place of a number's highest bit that difference 0 stands for. The place is written as its difference to that, in a tree of six
  decisions per row. Difference 63 means that the entry is written otherwise: as the 32 bits of its value.
* Then whether it crosses the farther border (a context per row), the two bits below the highest (contexts per difference), and those below
  them as they are; the lowest bits are left out if fewer digits are wanted.

Specified in docs/format.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pulse.coder import HALF, Reader, Writer
from pulse.errors import FormatError

ROWS, TREE = 12, 64
RAW = TREE - 1  # the difference that stands for a value as its 32 bits
FAR_AT = ROWS * TREE
NEXT_AT = FAR_AT + ROWS
CONTEXTS = NEXT_AT + 4 * TREE
PLACES = 32  # the number beyond a border is below 2^32
MANTISSA = 24  # bits, the implied one included: as many representable numbers apart, two weights differ by about a factor of two
START: NDArray[np.uint16] = np.full((CONTEXTS, 2), HALF, np.uint16)
_PAIRS: list[list[int]] = START.tolist()


def dropped(place: int, digits: int) -> int:
    """How many of the lowest bits are left out of a number whose highest bit lies at `place`.

    As many as leave `digits` bits; but never so many that the weight it leads to would keep fewer than `digits` bits itself.
    """
    return max(min(place + 1, MANTISSA) - digits, 0)


def encode(rows: Sequence[int], tops: Sequence[int], far: Sequence[int], beyond: Sequence[int], raw: Sequence[int], digits: int) -> bytes:
    """The values of one block as bytes, all (n,).

    beyond: at least 1, without the bits that `digits` leave out, or 0 for an entry that is written as raw. The highest bit of `beyond`
    lies 0 to 62 places under `tops`.
    """
    out = Writer(_PAIRS)
    for row, top, over, number, bits in zip(rows, tops, far, beyond, raw, strict=True):
        place = number.bit_length() - 1
        _put_difference(out, row, top - place if number else RAW)
        if not number:
            out.raw(bits, 32)
            continue
        out.bit(FAR_AT + row, over)
        _put_below(out, NEXT_AT + 4 * (top - place), number >> dropped(place, digits), place - dropped(place, digits))
    return out.finish()


def decode(data: bytes, rows: Sequence[int], tops: Sequence[int], digits: int) -> tuple[list[int], list[int], list[int]]:
    """The inverse of `encode`: far, beyond, raw. Raises `FormatError` for anything that `encode` would not have written."""
    source = Reader(data, _PAIRS)
    far: list[int] = []
    beyond: list[int] = []
    raw: list[int] = []
    for row, top in zip(rows, tops, strict=True):
        difference = _get_difference(source, row)
        whole = difference == RAW
        place = 0 if whole else top - difference
        if not 0 <= place < PLACES:
            raise FormatError("a block holds a value that is out of range")
        left_out = dropped(place, digits)
        raw.append(source.raw(32) if whole else 0)
        far.append(0 if whole else source.bit(FAR_AT + row))
        beyond.append(0 if whole else _get_below(source, NEXT_AT + 4 * difference, place - left_out) << left_out)
    if not source.finished:
        raise FormatError("a block holds other bytes than its values")
    return far, beyond, raw


def _put_difference(out: Writer, row: int, difference: int) -> None:
    node = 1
    for level in range(5, -1, -1):
        bit = difference >> level & 1
        out.bit(row * TREE + node, bit)
        node = node << 1 | bit


def _get_difference(source: Reader, row: int) -> int:
    node = 1
    while node < TREE:
        node = node << 1 | source.bit(row * TREE + node)
    return node - TREE


def _put_below(out: Writer, context: int, number: int, bits: int) -> None:
    """A number's lowest `bits` bits, all but its highest one."""
    if bits > 0:
        first = number >> (bits - 1) & 1
        out.bit(context, first)
        if bits > 1:
            out.bit(context + 1 + first, number >> (bits - 2) & 1)
            out.raw(number & ((1 << (bits - 2)) - 1), bits - 2)


def _get_below(source: Reader, context: int, bits: int) -> int:
    """The number."""
    number = 1
    if bits > 0:
        number = 2 | source.bit(context)
    if bits > 1:
        number = number << 1 | source.bit(context + 1 + (number & 1))
        number = number << (bits - 2) | source.raw(bits - 2)
    return number
