"""What both sides of an exchange know before it: the anchor, FP32 weights that they hold bit for bit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse.codec.cells import Cells, borders, cells_of, levels, levels_of

_F32_MANTISSA = 23


class Known(NamedTuple):
    """Some weights of the anchor: FP32 bits, steps to the borders of their cells, and level. All (n,)."""

    patterns: NDArray[np.uint32]
    outward: NDArray[np.int64]
    inward: NDArray[np.int64]
    level: NDArray[np.uint16]

    @property
    def exponents(self) -> NDArray[np.int64]:
        """FP32's exponent fields; of subnormal numbers that of the smallest normal one."""
        fields: NDArray[np.int64] = (self.patterns >> np.uint32(_F32_MANTISSA)).astype(np.int64) & 255
        return np.maximum(fields, 1)

    @property
    def octaves(self) -> NDArray[np.int64]:
        """The level in whole octaves."""
        return self.level.astype(np.int64) >> 2

    @property
    def outer(self) -> NDArray[np.bool_]:
        """Whether the outward border is the nearer one."""
        return self.outward < self.inward


@dataclass(frozen=True, slots=True)
class Anchor:
    """All weights of the anchor, laid end to end. pieces: (units,) uint32 each; views: the safetensors code of each piece's view.

    gated: whether every move crosses a border of its weight's cell; otherwise moves are counted from the weight itself. Raises
    `UnsupportedFormat` for a dtype that is no view of FP32.
    """

    pieces: tuple[NDArray[np.uint32], ...]
    views: tuple[str, ...]
    gated: bool = True
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        for piece, view in zip(self.pieces, self.views, strict=True):
            cells_of(view)
            if piece.dtype != np.uint32 or piece.ndim != 1:
                raise ValueError(f"a piece of an anchor is a row of uint32, the bits of FP32 weights, not {piece.dtype}{list(piece.shape)}")
        object.__setattr__(self, "starts", list(accumulate((piece.size for piece in self.pieces), initial=0)))

    @property
    def units(self) -> int:
        """How many weights there are."""
        return self.starts[-1]

    def within(self, lo: int, hi: int) -> Iterator[tuple[NDArray[np.uint32], Cells, int]]:
        """The stretches of pieces that lie in [lo, hi), the cells of their view, and where each begins."""
        for i in range(max(bisect_right(self.starts, lo) - 1, 0), len(self.pieces)):
            start, first, stop = self.starts[i], max(self.starts[i], lo), min(self.starts[i + 1], hi)
            if start >= hi:
                return
            if first < stop:
                yield self.pieces[i][first - start : stop - start], cells_of(self.views[i]), first

    def levels(self, lo: int, hi: int) -> NDArray[np.uint16]:
        """How far each weight in [lo, hi) is from changing its view; read only."""
        found = np.concatenate([np.empty(0, np.uint16), *(levels(flat, cells) for flat, cells, _ in self.within(lo, hi))])
        found.flags.writeable = False
        return found

    def at(self, positions: NDArray[np.uint64]) -> Known:
        """The weights at ascending positions."""
        lo, hi = (int(positions[0]), int(positions[-1]) + 1) if positions.size else (0, 0)
        patterns = np.empty(positions.size, np.uint32)
        outward, inward = np.empty(positions.size, np.int64), np.empty(positions.size, np.int64)
        for flat, cells, start in self.within(lo, hi):
            now = slice(*np.searchsorted(positions, np.array([start, start + flat.size], np.uint64)))
            patterns[now] = flat[positions[now] - np.uint64(start)]
            outward[now], inward[now] = borders(patterns[now], cells)
        level = levels_of(patterns, np.minimum(outward, inward))
        if self.gated:
            return Known(patterns, outward, inward, level)
        return Known(patterns, np.ones_like(outward), np.ones_like(inward), level)
