"""Blocks of the portable and the absolute encoding: gaps, and steps or new bits, as byte planes. No base is needed to read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.codec.lanes import from_gaps, to_gaps
from pulse.codec.sections import pack_planes, unpack_planes, unzigzag, zigzag
from pulse.errors import FormatError

Entry = tuple[int, int, int]  # changes, planes of gaps, planes of values: what the header says of a block


def pack(positions: NDArray[np.uint64], values: NDArray[Any], start: int, *, fold: bool) -> tuple[Entry, list[bytes]]:
    """The entry and the sections of one block. positions: in the lane, from `start` on; fold: values are steps."""
    gap_planes = pack_planes(to_gaps(positions, start))
    value_planes = pack_planes(zigzag(values) if fold else values)
    return (positions.size, len(gap_planes), len(value_planes)), gap_planes + value_planes


def unpack(
    entry: Entry, sections: Sequence[memoryview], span: tuple[int, int], dtype: np.dtype[Any], *, fold: bool
) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """The inverse of `pack`, for the block of these units of the lane."""
    count, gap_planes, _ = entry
    gaps = unpack_planes(sections[:gap_planes], count, np.dtype("<u4"), "gaps")
    values = unpack_planes(sections[gap_planes:], count, dtype, "values")
    if fold:
        values = unzigzag(values)
        if not values.all():
            raise FormatError("a step of zero: an unchanged unit is listed as changed")
    return from_gaps(gaps, *span), values
