"""Compiled twins of the plain counting functions, proven equal to them by `tests/property/test_analysis.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pulse.kernels.compiled import compiled


@compiled
def count_patterns(flat: NDArray[Any], counts: NDArray[np.int64]) -> None:
    """See `numbers.plain_count_patterns`."""
    shift = np.uint64(max(0, 8 * flat.itemsize - 16))
    for i in range(flat.size):
        counts[np.uint64(flat[i]) >> shift] += 1


@compiled
def pick(words: NDArray[np.uint64], old: NDArray[Any], new: NDArray[Any]) -> tuple[NDArray[np.uint64], NDArray[Any], NDArray[Any]]:
    """See `sequences.plain_pick`. words: eight of its bytes each, zeros after the last."""
    total = np.int64(0)
    for word in words:
        total += np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))  # how many of the eight are 1
    positions, before, after = np.empty(total, np.uint64), np.empty(total, old.dtype), np.empty(total, old.dtype)
    found = 0
    for i in range(words.size):
        word, at = words[i], 8 * i
        while word != np.uint64(0):
            if word & np.uint64(1):
                positions[found] = at
                before[found], after[found] = old[at], new[at]
                found += 1
            word >>= np.uint64(8)
            at += 1
    return positions, before, after


def _key_of(unit: Any, pad: Any, mirror: Any) -> Any:  # scalars inside compiled code
    signed = (np.int64(unit) << pad) >> pad
    return signed ^ ((signed >> np.int64(63)) & mirror)


def _length_of(number: Any) -> Any:
    bits = 0
    while number != np.uint64(0):
        number >>= np.uint64(1)
        bits += 1
    return bits


_key, _length = njit(_key_of), njit(_length_of)  # parts of the kernel below, and cached with it


@compiled
def tally(
    positions: NDArray[np.uint64],
    old: NDArray[Any],
    new: NDArray[Any],
    last: NDArray[Any],
    rules: NDArray[np.int64],
    sizes: NDArray[np.int64],
    left: NDArray[np.int64],
    arrived: NDArray[np.int64],
    since: NDArray[np.int64],
    pairs: NDArray[np.uint64],
) -> tuple[int, int, int]:
    """See `tally.plain_tally`. rules: moment, mantissa bits, mask of the class, mask that mirrors negative numbers."""
    moment, mantissa, mask, mirror = rules[0], np.uint64(rules[1]), np.uint64(rules[2]), rules[3]
    width = 8 * old.itemsize
    pad = np.int64(64 - width)
    up = again = same = 0
    for i in range(positions.size):
        before, after = np.uint64(old[i]), np.uint64(new[i])
        step = ((_key(after, pad, mirror) - _key(before, pad, mirror)) << pad) >> pad
        rises = step > 0
        sizes[_length(np.uint64(step if rises else -step) - np.uint64(1))] += 1
        kind = (before >> mantissa) & mask
        left[kind] += 1
        arrived[(after >> mantissa) & mask] += 1
        zigzag = np.uint64((step << np.int64(1)) ^ (step >> np.int64(63)))
        pairs[i] = (kind << np.uint64(width & 63)) | zigzag
        up += rises
        earlier = np.int64(last[positions[i]])
        if earlier != 0:
            agrees = (earlier > 0) == rises
            again += 1
            same += agrees
            since[moment - abs(earlier), 1 if agrees else 0] += 1
        last[positions[i]] = moment if rises else -moment
    return up, again, same


@compiled
def look_back(
    positions: NDArray[Any], old: NDArray[Any], bounds: NDArray[np.int64], current: NDArray[Any], scratch: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """See `past.plain_look_back`."""
    moments = bounds.size - 1
    found = np.zeros(moments, np.int64)
    begin, end = bounds[:-1].copy(), bounds[1:].copy()
    for start in range(0, current.size, 1 << 18):  # as much of the weights at a time as the cache holds, through all moments
        differ = np.int64(0)
        for moment in range(moments - 1, -1, -1):
            i = begin[moment]
            while i < bounds[moment + 1] and positions[i] < start + (1 << 18):
                at = positions[i]
                now = old[i] != current[at]
                differ += np.int64(now) - np.int64(scratch[at])
                scratch[at] = now
                i += 1
            end[moment] = i
            found[moments - 1 - moment] += differ
        for moment in range(moments):
            for i in range(begin[moment], end[moment]):
                scratch[positions[i]] = False
            begin[moment] = end[moment]
    return found
