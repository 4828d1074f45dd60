"""The entropy coder of the contextual encoding, in plain Python: the reference that compiled kernels are proven equal to.

An adaptive binary range coder. A number becomes a few yes-or-no decisions; each is coded with the probability that its *context* has
learnt so far, so nothing about statistics is stored. A change in a class is a gap (unchanged units of the class before it) and a folded
step:

* The class keeps a running mean m of its gaps, in 256ths. With 2^o <= m < 2^(o+1) and f the next two bits of m below the first, q = 4 o + f
  names the contexts, and s = max(0, o - 8) says how many low bits of the gap are nearly uniform. gap >> s goes in unary (17 contexts, then
  an escape), bit s - 1 in a context of its own, the bits below as they are.
* The step's magnitude: the place of its highest bit in unary (64 contexts per class), the next bit in a context, the rest as they are.

Contexts of gaps start where a geometric distribution of that mean has its probabilities, those of steps at one half.
Specified in docs/format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pulse.errors import FormatError

CLASSES = 16  # at most, in a lane
QUARTERS = 160  # values that q can take: gaps stay below 2^32
GAP = 18  # contexts per q: 17 for the unary part, and one for the bit below it
ESCAPE = 16  # from here on the unary part is cut short
STEP = 64  # contexts per class, for the place of a step's highest bit
STEPS_AT = QUARTERS * GAP
NEXT_AT = STEPS_AT + CLASSES * STEP
CONTEXTS = NEXT_AT + STEP
HALF, LEAST, MOST = 1 << 15, 32, (1 << 16) - 32  # probabilities of a 0, in 65536ths
FAST, SLOW, MEAN = 4, 7, 6  # how fast the two estimates of a context, and a class's mean, follow what they see
_WORD, _ALL = (1 << 32) - 1, (1 << 64) - 1


def _start() -> NDArray[np.uint16]:
    """Where the contexts start, (CONTEXTS, 2): both estimates of the probability of a 0."""
    table = np.full((CONTEXTS, 2), HALF, np.uint16)
    for q in range(QUARTERS):
        octave, quarter = min(q // 4, 20), q % 4  # beyond 2^12 units the shape no longer changes
        mean = ((9 + 2 * quarter) << octave) >> 3
        power = (max(mean, 1) << 32) // (max(mean, 1) + 256)  # P(gap >= 1), in 2^32ths; then P(gap >= 2^(s-1)), P(gap >= 2^s)
        for _ in range(octave - 9):
            power = power * power >> 32
        above = power * power >> 32 if octave > 8 else power
        table[q * GAP : q * GAP + GAP - 1] = _bounded((1 << 16) - (above >> 16))
        table[q * GAP + GAP - 1] = _bounded((1 << 16) - (power << 16) // ((1 << 32) + power))
    return table


def _bounded(probability: int) -> int:
    return min(max(probability, LEAST), MOST)


START = _start()
_PAIRS: list[list[int]] = START.tolist()  # replaced one by one as contexts learn, never altered


def encode(ranks: Sequence[int], folded: Sequence[int], starts: Sequence[int], means: Sequence[int], check: int) -> bytes:
    """The changes of one block as bytes.

    Class c has the changes starts[c] to starts[c + 1]: ranks ascending within the class, folded the zig-zag of outward steps, never 0, or
    empty for ranks alone. means: of the gaps of each class, in 256ths, at least 1. check: 32 bits that the decoder gives back.
    """
    out = Writer(_PAIRS)
    for c, (first, stop) in enumerate(pairwise(starts)):
        out.number(stop - first)
        gaps, last = _Gaps(means[c]), -1
        for j in range(first, stop):
            gaps.put(out, ranks[j] - last - 1)
            last = ranks[j]
            if folded:
                _put_step(out, c, folded[j])
    out.raw(check, 32)
    return out.finish()


def decode(
    data: bytes, classes: int, means: Sequence[int], count: int, size: int, highest: int
) -> tuple[list[int], list[int], list[int], int]:
    """The inverse of `encode`: ranks, folded steps, starts, check. Each rank is below `size`, each folded step at most `highest`.

    With `highest` 0 there are no steps. Raises `FormatError` for anything that `encode` would not have written, `count` changes in all.
    """
    source = Reader(data, _PAIRS)
    ranks: list[int] = []
    folded: list[int] = []
    starts = [0]
    for c in range(classes):
        number = source.number()
        if number > count - len(ranks):
            raise FormatError(f"a block holds more than the {count} changes that the header says")
        gaps = _Gaps(means[c])
        last = -1
        for _ in range(number):
            last += gaps.get(source) + 1
            step = _get_step(source, c) if highest else 0
            if last >= size or step > highest:
                raise FormatError("a block holds a rank or a step that is out of range")
            ranks.append(last)
            if highest:
                folded.append(step)
        starts.append(len(ranks))
    check = source.raw(32)
    if len(ranks) != count or not source.finished:
        raise FormatError(f"a block holds other than the {count} changes that the header says, or other bytes")
    return ranks, folded, starts, check


def finish(settled: bytes, low: int, width: int) -> bytes:
    """As few bytes as name a number in the interval that begins `low` behind the settled ones; the reader adds zeros at the end."""
    value = _shortest(low + (int.from_bytes(settled, "big") << 64), width)
    return value.to_bytes(8 + len(settled), "big").rstrip(b"\0")


def _shortest(low: int, width: int) -> int:
    """The first number in the interval that ends in as many zero bytes, of its last eight, as any in it."""
    rounded = (-(-low >> zeros) << zeros for zeros in range(64, -1, -8))
    return next(value for value in rounded if value < low + width)


class _Contexts:
    """The probabilities, and how they learn."""

    def __init__(self, start: Sequence[list[int]]) -> None:
        self.table = list(start)

    def of_zero(self, context: int) -> int:
        """The probability of a 0, in 65536ths."""
        fast, slow = self.table[context]
        return (fast + slow) >> 1

    def learn(self, context: int, bit: int) -> None:
        """Move both estimates towards what was seen."""
        seen = LEAST if bit else MOST
        fast, slow = self.table[context]
        self.table[context] = [fast + ((seen - fast) >> FAST), slow + ((seen - slow) >> SLOW)]


class Writer(_Contexts):
    """An interval [low, low + width) that narrows with every decision; settled 32-bit words leave at the top."""

    def __init__(self, start: Sequence[list[int]]) -> None:
        super().__init__(start)
        self.low, self.width = 0, _ALL  # low may exceed 64 bits by the words settled before
        self.words = 0

    def bit(self, context: int, bit: int) -> None:
        """One decision."""
        bound = (self.width >> 16) * self.of_zero(context)
        self._narrow(bound if bit else 0, self.width - bound if bit else bound)
        self.learn(context, bit)

    def raw(self, value: int, bits: int) -> None:
        """So many bits as they are, at most 16 at a time, highest first."""
        while bits:
            now = (bits - 1) % 16 + 1
            bits -= now
            width = self.width >> now
            self._narrow(width * (value >> bits & ((1 << now) - 1)), width)

    def number(self, value: int) -> None:
        """A number below 2^31 - 1: the length of value + 1, then its bits below the highest."""
        length = (value + 1).bit_length() - 1
        self.raw(length, 5)
        self.raw(value + 1 - (1 << length), length)

    def _narrow(self, above: int, width: int) -> None:
        self.low, self.width = self.low + above, width
        if self.width <= _WORD:
            self.low, self.width, self.words = self.low << 32, self.width << 32, self.words + 1

    def finish(self) -> bytes:
        """All bytes."""
        return finish((self.low >> 64).to_bytes(4 * self.words, "big"), self.low & _ALL, self.width)


class Reader(_Contexts):
    """Follows the writer: `code` is the number that the bytes name, less the writer's `low`."""

    def __init__(self, data: bytes, start: Sequence[list[int]]) -> None:
        super().__init__(start)
        self._data = data
        self._at = 8
        self.code, self.width = int.from_bytes(data[:8].ljust(8, b"\0"), "big"), _ALL

    def bit(self, context: int) -> int:
        """One decision."""
        bound = (self.width >> 16) * self.of_zero(context)
        bit = int(self.code >= bound)
        self._narrow(bound if bit else 0, self.width - bound if bit else bound)
        self.learn(context, bit)
        return bit

    def raw(self, bits: int) -> int:
        """So many bits as they are."""
        value = 0
        while bits:
            now = (bits - 1) % 16 + 1
            bits -= now
            width = self.width >> now
            found = min(self.code // width, (1 << now) - 1)
            self._narrow(width * found, width)
            value = value << now | found
        return value

    def number(self) -> int:
        """The inverse of the writer's."""
        length = self.raw(5)
        return (1 << length) + self.raw(length) - 1

    def _narrow(self, above: int, width: int) -> None:
        self.code, self.width = self.code - above, width
        if self.width <= _WORD:
            word = int.from_bytes(self._data[self._at : self._at + 4].ljust(4, b"\0"), "big")
            self._at += 4
            self.code, self.width = (self.code << 32 | word) & _ALL, self.width << 32

    @property
    def finished(self) -> bool:
        """Whether the bytes are the writer's: they end where it ends, and name the number that it chooses."""
        last = int.from_bytes(self._data[self._at - 8 : self._at].ljust(8, b"\0"), "big")
        chosen = _shortest((last - self.code) & _ALL, self.width) & _ALL
        return self._at >= len(self._data) and not self._data.endswith(b"\0") and last == chosen


class _Gaps:
    """The gaps of one class: their running mean decides how the next one is written."""

    def __init__(self, mean: int) -> None:
        self._mean = mean

    @property
    def _shape(self) -> tuple[int, int]:
        """The first context, and how many low bits are nearly uniform."""
        octave = self._mean.bit_length() - 1
        quarter = (self._mean << 2 >> octave) & 3
        return (4 * octave + quarter) * GAP, max(0, octave - 8)

    def _learn(self, gap: int) -> None:
        self._mean = max(1, self._mean + (((gap << 8) - self._mean) >> MEAN))

    def put(self, out: Writer, gap: int) -> None:
        """Write one."""
        context, low = self._shape
        high = gap >> low
        for place in range(min(high, ESCAPE)):
            out.bit(context + place, 1)
        if high < ESCAPE:
            out.bit(context + high, 0)
        else:
            out.number(high - ESCAPE)
        if low:
            out.bit(context + GAP - 1, gap >> (low - 1) & 1)
            out.raw(gap & ((1 << (low - 1)) - 1), low - 1)
        self._learn(gap)

    def get(self, source: Reader) -> int:
        """Read one."""
        context, low = self._shape
        gap = 0
        while gap < ESCAPE and source.bit(context + gap):
            gap += 1
        if gap == ESCAPE:
            gap += source.number()
        if low:
            gap = gap << 1 | source.bit(context + GAP - 1)
            gap = gap << (low - 1) | source.raw(low - 1)
        if gap > _WORD:
            raise FormatError("a block holds a rank that is out of range")
        self._learn(gap)
        return gap


def _put_step(out: Writer, c: int, folded: int) -> None:
    size = (folded + 1) >> 1
    place = size.bit_length() - 1
    for lower in range(place):
        out.bit(STEPS_AT + c * STEP + lower, 1)
    if place < STEP - 1:
        out.bit(STEPS_AT + c * STEP + place, 0)
    out.raw(folded & 1, 1)
    if place:
        out.bit(NEXT_AT + place, size >> (place - 1) & 1)
        out.raw(size & ((1 << (place - 1)) - 1), place - 1)


def _get_step(source: Reader, c: int) -> int:
    place = 0
    while place < STEP - 1 and source.bit(STEPS_AT + c * STEP + place):
        place += 1
    sign = source.raw(1)
    size = 1
    if place:
        size = 2 | source.bit(NEXT_AT + place)
        size = size << (place - 1) | source.raw(place - 1)
    return 2 * size - sign
