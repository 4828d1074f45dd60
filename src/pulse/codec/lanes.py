"""How the changes of many parts become a few long rows of numbers, and back.

All parts of one dtype, in the order of the header, lie end to end in one *lane*; a lane is cut into blocks of equal size (the last
one may be shorter). Small tensors thus share blocks, and large ones span several. Gaps restart in every block, so a block decodes
alone. Which part and block a number belongs to follows from the header, and is never stored.
"""

from __future__ import annotations

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
    """The parts of one dtype, end to end. ends: where each part stops, in units."""

    dtype: DType
    parts: tuple[Part, ...]

    @property
    def borders(self) -> list[int]:
        """Where each part starts, and where the last one stops."""
        return list(accumulate((part.units for part in self.parts), initial=0))

    def blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """The (start, stop) of each block."""
        end = self.borders[-1]
        for start in range(0, end, size):
            yield start, min(start + size, end)


def lanes_of(parts: Sequence[Part]) -> list[Lane]:
    """The lanes of these parts, in the order in which their dtypes first appear."""
    by_dtype: dict[str, list[Part]] = {}
    for part in parts:
        by_dtype.setdefault(part.spec.dtype, []).append(part)
    return [Lane(dtype_of(name), tuple(group)) for name, group in by_dtype.items()]


def join(lane: Lane, changes: dict[Part, TensorPatch]) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """Positions in the lane, ascending, and their values. Both (n,)."""
    starts = lane.borders
    positions = [changes[part].positions + np.uint64(start) for part, start in zip(lane.parts, starts, strict=False)]
    return np.concatenate(positions), np.concatenate([changes[part].values for part in lane.parts])


def split(lane: Lane, positions: NDArray[np.uint64], values: NDArray[Any]) -> Iterator[TensorPatch]:
    """The inverse of `join`."""
    borders = lane.borders
    cuts = np.searchsorted(positions, np.array(borders, np.uint64))
    for part, start, (lo, hi) in zip(lane.parts, borders, pairwise(cuts), strict=False):
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
