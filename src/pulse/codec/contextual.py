"""Blocks of the contextual encoding: ranks within the classes of the base, and outward steps, entropy coded.

Both sides have the base, so both know which class every unit belongs to. A change is written as its class, how many unchanged units of
that class lie before it, and how far it moved, outward (away from zero) or inward.

Where values follow a pattern that no class knows of, such as rows that were all set to one number, zstd finds it and the entropy coder does
not: such a block is written as the portable encoding writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.bits import DType, TensorBits, advance
from pulse.codec import gaps, ranks
from pulse.codec.classes import Classes, choose, exponent, exponents_of, mask_of
from pulse.codec.lanes import Lane
from pulse.codec.sections import unzigzag, zigzag
from pulse.digest import sum_at
from pulse.errors import BaseMismatch, FormatError, WeightsMismatch
from pulse.mixer import C1
from pulse.patch import Part

Base = Callable[[str], TensorBits]  # the bits that a patch applies to, by the tensor's name
_SAMPLE = 1 << 20  # units of a lane from which its classes are decided: a quarter of that misjudges classes of few units (docs/log.md)
_WORTH = 64  # bytes that gaps and steps must save in a block: unlike ranks, they say nothing of units that do not change


def units_of(part: Part, base: Base, lo: int = 0, hi: int | None = None) -> NDArray[Any]:
    """The base's units from `lo` to `hi` of a part, in the order of its positions; of a box, a copy of the rows around them."""
    hi = part.units if hi is None else hi
    bits = base(part.name)
    if bits.spec != part.spec:
        raise WeightsMismatch(f"{part.name}: the patch is for {part.spec}, these weights have {bits.spec}")
    if part.box is None:
        start = part.span[0] if part.span is not None else 0
        return bits.flat[start + lo : start + hi]
    box = np.atleast_1d(bits.flat.reshape(bits.shape)[tuple(slice(*pair) for pair in part.box)])
    row = max(math.prod(box.shape[1:]), 1)
    return box[lo // row : -(-hi // row)].reshape(-1)[lo % row : lo % row + hi - lo]


def classes_of(lane: Lane, positions: NDArray[np.uint64], base: Base, blocks: int) -> Classes:
    """The classes for a lane with changes at these positions."""
    if not lane.dtype.is_float:
        return choose(np.array([float(lane.borders[-1])]), np.array([positions.size]), blocks)
    pace = max(1, lane.borders[-1] // _SAMPLE) | 1  # odd, so that it does not keep step with the rows of a matrix
    size = exponents_of(lane.dtype)
    seen, changed = np.zeros(size), np.zeros(size, np.int64)
    for part, (start, stop) in zip(lane.parts, pairwise(lane.borders), strict=True):
        flat = units_of(part, base)
        sample = np.bincount(exponent(flat[::pace], lane.dtype), minlength=size)
        seen += sample * (flat.size / max(int(sample.sum()), 1))
        lo, hi = np.searchsorted(positions, np.array([start, stop], np.uint64))
        changed += np.bincount(exponent(flat[positions[lo:hi] - np.uint64(start)], lane.dtype), minlength=size)
    return choose(seen, changed, blocks)


def encode_block(
    lane: Lane, span: tuple[int, int], positions: NDArray[np.uint64], steps: NDArray[Any], classes: Classes, base: Base
) -> tuple[gaps.Entry, list[bytes]]:
    """The entry and the sections of one block. positions: in the lane, inside `span`; steps: (n,) from the base's bits, none of them 0."""
    if not positions.size:
        return (0, 0, 0), []
    section = encode_ranks(lane, span, positions, steps, classes, base)
    entry, planes = gaps.pack(positions, steps, span[0], fold=True)
    if sum(map(len, planes)) + _WORTH < len(section):
        return entry, [*planes, _unclassed_check(positions, _old_at(lane, span, positions, base))]
    return (positions.size, 1, 0), [section]


def decode_block(
    lane: Lane, span: tuple[int, int], entry: gaps.Entry, sections: Sequence[memoryview], classes: Classes, base: Base
) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """The inverse of `encode_block`: positions in the lane, and the new bits there."""
    if not sections:
        return nothing(entry[0], lane.dtype)
    if not entry[2]:
        return decode_ranks(lane, span, entry[0], sections[0], classes, base)
    *planes, check = sections
    if len(check) != 4:
        raise FormatError(f"a check of {len(check)} bytes; a block of gaps and steps has one of 4")
    positions, steps = gaps.unpack(entry, planes, span, lane.dtype.unsigned, fold=True)
    old = _old_at(lane, span, positions, base)
    if _unclassed_check(positions, old) != check:
        raise BaseMismatch("the weights differ from those that the patch was made for")
    return positions, advance(old, steps, lane.dtype)


def encode_ranks(
    lane: Lane, span: tuple[int, int], positions: NDArray[np.uint64], steps: NDArray[Any], classes: Classes, base: Base
) -> bytes:
    """The section of a block that is written as ranks and outward steps."""
    cuts, mask = classes.cuts(lane.dtype), mask_of(lane.dtype)
    seen = np.zeros(len(classes.means), np.int64)
    class_of, ranked = np.empty(positions.size, np.uint8), np.empty(positions.size, np.uint32)
    old = np.empty(positions.size, lane.dtype.unsigned)
    for flat, start in _pieces(lane, span, base):
        lo, hi = np.searchsorted(positions, np.array([start, start + flat.size], np.uint64))
        inside = positions[lo:hi] - np.uint64(start)
        old[lo:hi] = flat[inside]
        class_of[lo:hi], ranked[lo:hi] = ranks.rank(flat, inside, cuts, mask, seen)
    order = np.argsort(class_of, kind="stable")
    folded = zigzag(_outward(steps, old, lane.dtype))[order].astype(np.uint64)
    starts = np.insert(np.cumsum(np.bincount(class_of, minlength=seen.size)), 0, 0)
    return ranks.encode(ranked[order], folded, starts, classes.means, check_of(seen, positions, old))


def decode_ranks(
    lane: Lane, span: tuple[int, int], count: int, section: bytes | memoryview, classes: Classes, base: Base
) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """The inverse of `encode_ranks`: positions in the lane, and the new bits there."""
    cuts, mask = classes.cuts(lane.dtype), mask_of(lane.dtype)
    highest = (1 << 8 * lane.dtype.width) - 1
    ranked, folded, starts, check = ranks.decode(section, classes.means, count, span[1] - span[0], highest)
    steps = unzigzag(folded.astype(lane.dtype.unsigned))
    seen, nexts = np.zeros(len(classes.means), np.int64), starts[:-1].copy()
    positions, which = np.empty(count, np.uint64), np.empty(count, np.int64)
    old = np.empty(count, lane.dtype.unsigned)
    done = 0
    for flat, start in _pieces(lane, span, base):
        found, order = ranks.select(flat, cuts, mask, seen, ranked, nexts, starts[1:])
        now = slice(done, done + found.size)
        old[now], which[now], positions[now] = flat[found], order, found + np.uint64(start)
        done += found.size
    if done != count or check_of(seen, positions, old) != check:
        raise BaseMismatch("the weights differ from those that the patch was made for")
    return positions, advance(old, _outward(steps[which], old, lane.dtype), lane.dtype)


def nothing(count: int, dtype: DType) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """What a block without a section holds."""
    if count:
        raise FormatError(f"a block of {count} changes has no section")
    return np.empty(0, np.uint64), np.empty(0, dtype.unsigned)


def _pieces(lane: Lane, span: tuple[int, int], base: Base) -> Iterator[tuple[NDArray[Any], int]]:
    """The base of a block, piece by piece, and where each begins in the lane.

    Contiguous and read only, whatever the base is: kernels are compiled anew for any other kind of memory.
    """
    for part, lo, hi, start in lane.pieces(span):
        flat = np.ascontiguousarray(units_of(part, base, lo, hi))
        flat.flags.writeable = False
        yield flat, start


def _outward(steps: NDArray[Any], old: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Steps counted away from zero, of floats: those of negative numbers turned round. Its own inverse, modulo 2^w."""
    if not dtype.is_float:
        return steps
    negative = old >> dtype.unsigned.type(8 * dtype.width - 1)
    turned: NDArray[Any] = (steps ^ -negative) + negative
    return turned


def _old_at(lane: Lane, span: tuple[int, int], positions: NDArray[np.uint64], base: Base) -> NDArray[Any]:
    """The base's bits at some positions of the lane, inside `span`."""
    old = np.empty(positions.size, lane.dtype.unsigned)
    for flat, start in _pieces(lane, span, base):
        lo, hi = np.searchsorted(positions, np.array([start, start + flat.size], np.uint64))
        old[lo:hi] = flat[positions[lo:hi] - np.uint64(start)]
    return old


def _unclassed_check(positions: NDArray[np.uint64], old: NDArray[Any]) -> bytes:
    """The check of a block of gaps and steps."""
    return check_of(np.empty(0, np.int64), positions, old).to_bytes(4, "little")


def check_of(seen: NDArray[np.int64], positions: NDArray[np.uint64], old: NDArray[Any]) -> int:
    """32 bits that tell one base from another: how many units each class has, and the bits where something changes."""
    total = sum_at(positions, old).lane0
    for number in seen.tolist():
        total = ((total ^ number) * C1 + number) & 0xFFFFFFFFFFFFFFFF
    return total >> 32
