"""How the changes of many parts become a few long rows of numbers, and back.

All parts of one dtype, in the order of the header, lie end to end in one *lane*; a lane is cut into blocks of equal size (the last
one may be shorter). Small tensors thus share blocks, and large ones span several. Gaps restart in every block, so a block decodes
alone. Which part and block a number belongs to follows from the header, and is never stored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.bits import DType, dtype_of
from pulse.errors import FormatError
from pulse.patch import Part, TensorPatch

BLOCK = 1 << 22  # units: 8 MiB of BF16, small enough to stay near a core's cache and to bound a reader's memory
MAX_BLOCK = 1 << 28


@dataclass(frozen=True, slots=True)
class Lane:
    """The parts of one dtype, end to end. borders: where each part starts, in units, and where the last one stops."""

    dtype: DType
    parts: tuple[Part, ...]
    borders: tuple[int, ...]

    def blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """The (start, stop) of each block."""
        end = self.borders[-1]
        for start in range(0, end, size):
            yield start, min(start + size, end)

    def pieces(self, span: tuple[int, int]) -> Iterator[tuple[Part, int, int, int]]:
        """The parts that lie in a stretch of the lane: which, from where to where inside it, and where that begins in the lane."""
        index = max(bisect_right(self.borders, span[0]) - 1, 0)
        for part, start in zip(self.parts[index:], self.borders[index:], strict=False):
            if start >= span[1]:
                return
            lo, hi = max(start, span[0]), min(start + part.units, span[1])
            if lo < hi:
                yield part, lo - start, hi - start, lo


def lanes_of(parts: Sequence[Part]) -> list[Lane]:
    """The lanes of these parts, in the order in which their dtypes first appear."""
    by_dtype: dict[str, list[Part]] = {}
    for part in parts:
        by_dtype.setdefault(part.spec.dtype, []).append(part)
    return [
        Lane(dtype_of(name), tuple(group), tuple(accumulate((part.units for part in group), initial=0))) for name, group in by_dtype.items()
    ]


def join(lane: Lane, changes: dict[Part, TensorPatch]) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """Positions in the lane, ascending, and their values. Both (n,)."""
    positions = [changes[part].positions + np.uint64(start) for part, start in zip(lane.parts, lane.borders, strict=False)]
    return np.concatenate(positions), np.concatenate([changes[part].values for part in lane.parts])


def split(lane: Lane, positions: NDArray[np.uint64], values: NDArray[Any]) -> Iterator[TensorPatch]:
    """The inverse of `join`."""
    cuts = np.searchsorted(positions, np.array(lane.borders, np.uint64))
    for part, start, (lo, hi) in zip(lane.parts, lane.borders, pairwise(cuts), strict=False):
        yield TensorPatch(part, positions[lo:hi] - np.uint64(start), values[lo:hi])


def to_gaps(positions: NDArray[np.uint64], start: int) -> NDArray[np.uint32]:
    """Ascending positions of one block, from `start` on, as the numbers of unchanged units before each."""
    inside = (positions - np.uint64(start)).astype(np.uint32)
    gaps = inside.copy()
    gaps[1:] -= inside[:-1] + np.uint32(1)
    return gaps


def from_gaps(gaps: NDArray[np.uint32], start: int, stop: int) -> NDArray[np.uint64]:
    """The inverse of `to_gaps`; `FormatError` if the block is too short for these gaps."""
    positions = np.arange(start, start + gaps.size, dtype=np.uint64)
    positions += np.cumsum(gaps, dtype=np.uint64)
    if positions.size and int(positions[-1]) >= stop:
        raise FormatError(f"a block of {stop - start} units holds a position {int(positions[-1]) - start}")
    return positions
