"""A reader of payloads in plain Python, written from docs/format.md alone: it shares no code with the package that it is held against.

    decode(blob, pieces, views) -> (header, positions, values): positions as integers, values as their FP32 bits

`pieces` are the anchor's tensors as rows of FP32 bits, `views` their safetensors codes. Whatever is wrong is a `ValueError`. Slow.
"""

import hashlib
import json
import struct
from bisect import bisect_right

import numpy as np
import zstandard

WORD, ALL = (1 << 32) - 1, (1 << 64) - 1
MANTISSA = {"F32": 23, "BF16": 7, "F16": 10, "F8_E4M3": 3, "F8_E5M2": 2, "F8_E4M3FNUZ": 3, "F8_E5M2FNUZ": 2}
SMALLEST = {"F16": 113, "F8_E4M3": 121, "F8_E5M2": 113, "F8_E4M3FNUZ": 120, "F8_E5M2FNUZ": 112}
KEPT = {"float32": 32, "bfloat16": 8, "float8": 4}


def must(true, what):
    """`ValueError` unless it is."""
    if not true:
        raise ValueError(what)


def fp32(bits):
    """The number with these bits."""
    return np.array([bits], np.uint32).view(np.float32)[0]


def bits_of(number):
    """The bits of an FP32 number."""
    return int(np.array([number], np.float32).view(np.uint32)[0])


# --- the container ---


def sections_of(blob):
    """The header and the sections."""
    must(len(blob) >= 52, "too short")
    magic, version, flags, stored, raw = struct.unpack_from("<8sHHII", blob)
    must(magic == b"\x89PULSE\r\n" and (version, flags) == (0, 0), "magic, version, flags")
    must(hashlib.sha256(blob[:-32]).digest() == blob[-32:], "trailer")
    text = unpacked(blob[20 : 20 + stored], raw)
    header = json.loads(text)
    must(json.dumps(header, sort_keys=True, separators=(",", ":")).encode() == text, "canonical form")
    sections, at = [], 20 + stored
    for size in header.pop("sections"):
        sections.append(blob[at : at + size])
        at += size
    must(at == len(blob) - 32, "sections fill the payload")
    return header, sections


def unpacked(stored, size):
    """The bytes of a section."""
    must(len(stored) <= size, "a section larger than its content")
    if len(stored) == size:
        return bytes(stored)
    must(zstandard.get_frame_parameters(stored).content_size == size, "content size")
    return zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)


# --- the coder ---


class Coder:
    """Reads the decisions of one section; `table` holds the two estimates of each context."""

    def __init__(self, data, table):
        self.data, self.table = data, table
        self.low, self.width = 0, ALL
        self.taken = 64  # bits of the number that the bytes name, zeros added, that are compared so far
        self.named = int.from_bytes(data.ljust(8, b"\0")[:8], "big")

    def take(self, above, width):
        """Go on inside the interval."""
        self.low, self.width = self.low + above, width
        if self.width < 1 << 32:
            at = self.taken // 8
            self.named = self.named << 32 | int.from_bytes(self.data[at : at + 4].ljust(4, b"\0"), "big")
            self.low, self.width, self.taken = self.low << 32, self.width << 32, self.taken + 32

    def bit(self, context):
        """One decision."""
        a, b = self.table[context]
        bound = (self.width >> 16) * ((a + b) >> 1)
        one = self.named - self.low >= bound
        self.take(bound if one else 0, self.width - bound if one else bound)
        target = 32 if one else 65504
        self.table[context] = a + ((target - a) >> 4), b + ((target - b) >> 7)
        return int(one)

    def raw(self, count):
        """So many raw bits."""
        value = 0
        while count:
            now = count % 16 or 16
            count -= now
            part = self.width >> now
            found = (self.named - self.low) // part
            must(found < 1 << now, "raw bits outside the interval")
            self.take(part * found, part)
            value = value << now | found
        return value

    def number(self):
        """A number."""
        n = self.raw(5)
        return (1 << n | self.raw(n)) - 1

    def end(self):
        """Refuse bytes that a writer would not have written."""
        must(self.low <= self.named < self.low + self.width and 8 * len(self.data) <= self.taken, "bytes behind the end")
        for zeros in range(64, -1, -8):
            first = -(-self.low >> zeros) << zeros
            if first < self.low + self.width:
                break
        must(self.named == first and not self.data.endswith(b"\0"), "not the shortest bytes")


# --- levels ---


def middles_of(view):
    """The midpoints below the place from which on they lie 2 h apart, that place, and h."""
    m = MANTISSA[view]
    half = 1 << (22 - m)
    if view == "BF16":
        return [], half, half
    b = SMALLEST[view]
    low = [bits_of(np.float32((2 * j + 1) * 2.0 ** (b - 128 - m))) for j in range((1 << m) + 1)]
    must(low[-1] == (b << 23) + half, "the last one")
    return low[:-1], low[-1], half


def distances(a, view):
    """(o, i) of a magnitude."""
    if view == "F32":
        return 1, 1
    low, start, half = middles_of(view)

    def middle(j):  # all of them, counted
        return low[j] if j < len(low) else start + 2 * half * (j - len(low))

    below = bisect_right(low, a) - 1 if a < start else len(low) + (a - start) // (2 * half)  # the last one up to a, or -1
    if below >= 0 and middle(below) == a:
        even = below % 2 == 0 if below < len(low) else not a >> (23 - MANTISSA[view]) & 1
        if not even:
            return middle(below + 1) - a, 1
        return 1, a - middle(below - 1) if below else a + middle(0) + 1
    return middle(below + 1) - a, a - middle(below) if below >= 0 else a + middle(0) + 1


def level_of(pattern, o, i):
    """The level of a weight."""
    d = bits_of(np.float32(min(o, i)))
    return 4 * (exponent_of(pattern) + (d >> 23) - 127) + (d >> 21 & 3)


def exponent_of(pattern):
    """The exponent field, at least 1."""
    return max(pattern >> 23 & 255, 1)


# --- positions ---


def gap_table():
    """Where the contexts of gaps start."""
    table = []
    for q in range(160):
        o, mu_at = min(q >> 2, 20), q & 3
        mu = max(1, ((9 + 2 * mu_at) << o) >> 3)
        t = (mu << 32) // (mu + 256)
        for _ in range(max(0, o - 9)):
            t = t * t >> 32
        above = t * t >> 32 if o > 8 else t
        unary, next_bit = 65536 - (above >> 16), 65536 - (t << 16) // ((1 << 32) + t)
        table += [(min(max(p, 32), 65504),) * 2 for p in [unary] * 17 + [next_bit]]
    return table


GAPS = gap_table()


def gap(coder, mean):
    """A gap, and the mean after it."""
    o = mean.bit_length() - 1
    q, s = 4 * o + ((mean << 2 >> o) & 3), max(0, o - 8)
    high = 0
    while high < 16 and coder.bit(18 * q + high):
        high += 1
    if high == 16:
        high += coder.number()
    if s:
        high = high << 1 | coder.bit(18 * q + 17)
        high = high << (s - 1) | coder.raw(s - 1)
    return high, max(1, mean + ((256 * high - mean) >> 6))


def mixed(position, bits):
    """Lane 0 of the state digest's sum, of one unit."""
    h = (position + 1) * 0x9E3779B97F4A7C15 & ALL
    h ^= h >> 32
    x = (bits ^ h) * 0xBF58476D1CE4E5B9 & ALL
    x ^= x >> 29
    x = x * 0x94D049BB133111EB & ALL
    return x ^ x >> 32


def positions_of(section, count, members, means):
    """The positions in a block, ascending, and the check. members: the positions in each class, ascending."""
    coder = Coder(section, list(GAPS))
    found = []
    for own, start in zip(members, means, strict=True):
        rank, mean = -1, start
        number = coder.number()
        must(number <= count - len(found), "more entries than the header says")
        for _ in range(number):
            step, mean = gap(coder, mean)
            rank += step + 1
            must(rank < len(own), "a rank beyond its class: another anchor, or malformed")
            found.append(own[rank])
    check = coder.raw(32)
    coder.end()
    must(len(found) == count, "fewer entries than the header says")
    return sorted(found), check


def check_of(members, positions, patterns):
    """The check that should be there."""
    total = sum(mixed(p, patterns[p]) for p in positions) & ALL
    for n in map(len, members):
        total = ((total ^ n) * 0xBF58476D1CE4E5B9 + n) & ALL
    return total >> 32


# --- values ---


def key_of(pattern):
    """Patterns in the order of their numbers; its own inverse."""
    signed = pattern - (1 << 32) if pattern >> 31 else pattern
    return signed ^ ((signed >> 31) & 0x7FFFFFFF)


def value(coder, pattern, level, o, i, middle, digits):
    """The bits of one value."""
    r = min(max(middle + 4 - (level >> 2), 0), 11)
    node = 1
    for _ in range(6):
        node = 2 * node + coder.bit(64 * r + node)
    delta = node - 64
    if delta == 63:
        return coder.raw(32)
    p = middle + 24 - exponent_of(pattern) - delta
    must(0 <= p <= 31, "a value out of range")
    far = coder.bit(768 + r)
    x = max(0, min(p + 1, 24) - digits)
    number, k = 1, p - x
    if k > 0:
        number = 2 | coder.bit(780 + 4 * delta)
    if k > 1:
        number = 2 * number + coder.bit(781 + 4 * delta + (number & 1))
        number = number << (k - 2) | coder.raw(k - 2)
    number <<= x
    outward = (o < i) if far == 0 else not o < i
    n = (o if outward else i) + number - 1
    key = key_of(pattern) + (n if outward == (pattern >> 31 == 0) else -n)
    must(-(1 << 31) <= key < 1 << 31, "a key out of range")
    with np.errstate(all="ignore"):
        return bits_of(fp32(pattern) - fp32(key_of(key & WORD) & WORD))


def decode(blob, pieces, views):
    """See above."""
    header, sections = sections_of(bytes(blob))
    must(set(header) == {"kind", "facts", "units", "block", "gated", "value_dtype", "blocks", "classes"}, "keys")
    must(header["kind"] == "payload" and header["value_dtype"] in KEPT, "kind, value dtype")
    patterns = [int(bits) for piece in pieces for bits in piece]
    view_of = [view for piece, view in zip(pieces, views, strict=True) for _ in piece]
    must(header["units"] == len(patterns), "another anchor")
    (limits, means), sections = header["classes"], iter(sections)
    positions, values = [], []
    for index, (count, middle) in enumerate(header["blocks"]):
        if not count:
            continue
        near, members = {}, [[] for _ in means]
        for at in range(index * header["block"], min((index + 1) * header["block"], len(patterns))):
            o, i = distances(patterns[at] & 0x7FFFFFFF, view_of[at])
            level = level_of(patterns[at], o, i)
            near[at] = (level, o, i) if header["gated"] else (level, 1, 1)
            members[bisect_right(limits, level)].append(at)
        found, check = positions_of(next(sections), count, members, means)
        must(check == check_of(members, found, patterns), "another anchor")
        coder = Coder(next(sections), [(32768, 32768)] * 1036)
        for at in found:
            values.append(value(coder, patterns[at], *near[at], middle, KEPT[header["value_dtype"]]))
            must(values[-1] >> 23 & 255 != 255, "a value that is not finite")
        coder.end()
        positions += found
    return header, positions, values
