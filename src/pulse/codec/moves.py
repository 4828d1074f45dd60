"""Values of a pseudo-gradient as moves of the anchor's weights, and back.

A value s turns the weight A into the FP32 number A - s. Between numbers of nearly equal exponent that is exact, and s follows from how many
representable numbers lie between the two: far fewer bits than s has. What does not come out bit for bit stays as it is, in 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse.bits import dtype_of, from_key, to_key
from pulse.codec.known import Known
from pulse.value_coder import MANTISSA, PLACES

_F32 = dtype_of("F32")
_MOST = (1 << PLACES) - 1
_LEAST_KEY, _MOST_KEY = -(1 << 31), (1 << 31) - 1


class Moves(NamedTuple):
    """far: 1 if it is the farther border that is crossed; beyond: FP32 numbers beyond it, from 1, or 0: see raw, the value's bits. (n,)."""

    far: NDArray[np.uint8]
    beyond: NDArray[np.uint32]
    raw: NDArray[np.uint32]

    def only(self, these: NDArray[np.bool_], values: NDArray[np.float32]) -> Moves:
        """Of these as they are; of all others the bits of their values."""
        kept = these & (self.beyond != 0)
        return Moves(
            np.where(kept, self.far, np.uint8(0)),
            np.where(kept, self.beyond, np.uint32(0)),
            np.where(kept, np.uint32(0), values.view(np.uint32)),
        )


def moves_of(values: NDArray[np.float32], known: Known, digits: int) -> tuple[Moves, NDArray[np.float32]]:
    """The moves that these values are, and the values that they stand for: the same ones, unless `digits` are fewer than 24.

    Moves are then shortened towards the border that they cross, so that no value grows or changes its sign. Whatever is left out of a value
    stays behind exactly: sent + (value - sent) is the value, bit for bit; only that a negative zero, sent as it is, sums to 0.
    """
    steps = _steps(known.patterns, values)
    outside = steps > 0
    number = np.abs(steps) - np.where(outside, known.outward, known.inward) + 1
    number = np.where(number > _MOST, 0, np.maximum(number, 0))
    moves = Moves((outside != known.outer).astype(np.uint8), number.astype(np.uint32), values.view(np.uint32))
    exact = _same(values_of(moves, known), values)
    if digits >= MANTISSA:
        return moves.only(exact, values), values
    moves = moves._replace(beyond=shortened(number, digits).astype(np.uint32))
    sent = values_of(moves, known)
    exact &= _same(sent + (values - sent), values)
    return moves.only(exact, values), np.where(exact, sent, values)


def values_of(moves: Moves, known: Known) -> NDArray[np.float32]:
    """The inverse: the values, (n,); NaN where a move leads beyond all numbers."""
    outside = (moves.far != 0) != known.outer
    steps = np.where(outside, known.outward, known.inward) + moves.beyond.astype(np.int64) - 1
    key = _keys(known.patterns) + np.where(outside, steps, -steps) * _signs(known.patterns)
    inside = (key >= _LEAST_KEY) & (key <= _MOST_KEY)
    target = from_key(np.where(inside, key, 0).astype(np.int32).view(np.uint32), _F32).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.where(inside, known.patterns.view(np.float32) - target, np.float32(np.nan))
    return np.where(moves.beyond != 0, values, moves.raw.view(np.float32))


def places_of(number: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of the highest bit of numbers from 1 to 2^53; -1 for 0."""
    places: NDArray[np.int64] = np.frexp(number.astype(np.float64))[1].astype(np.int64) - 1
    return places


def shortened(number: NDArray[np.int64], digits: int) -> NDArray[np.int64]:
    """Numbers without the bits that `pulse.value_coder.dropped` leaves out."""
    left_out: NDArray[np.int64] = np.maximum(np.minimum(places_of(number) + 1, MANTISSA) - digits, 0)
    return number >> left_out << left_out


def _steps(patterns: NDArray[np.uint32], values: NDArray[np.float32]) -> NDArray[np.int64]:
    """How many representable numbers the weights move outward."""
    with np.errstate(invalid="ignore", over="ignore"):
        target = patterns.view(np.float32) - values
    return (_keys(target.view(np.uint32)) - _keys(patterns)) * _signs(patterns)


def _keys(patterns: NDArray[np.uint32]) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = to_key(patterns, _F32).view(np.int32).astype(np.int64)
    return keys


def _signs(patterns: NDArray[np.uint32]) -> NDArray[np.int64]:
    """1, or -1 for negative weights: outward is then downward."""
    return 1 - 2 * (patterns >> np.uint32(31)).astype(np.int64)


def _same(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = left.view(np.uint32) == right.view(np.uint32)
    return same
