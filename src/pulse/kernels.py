"""Compiled twins of the plain numpy functions, proven equal to them by `tests/property/test_kernels.py`.

Each runs without the GIL. The first call of each, per width, compiles it (about a second in all); the result is cached on disk, and
where no cache can be written it is compiled again in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pulse.mixer import C0, C1, C2, C3, C4

_ONE, _S29, _S30, _S31, _S32 = (np.uint64(n) for n in (1, 29, 30, 31, 32))
_C0, _C1, _C2, _C3, _C4 = (np.uint64(c) for c in (C0, C1, C2, C3, C4))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        compiled: Callable[..., Any] = njit(function, nogil=True, cache=True)
    except RuntimeError:  # numba found no place where it may write its cache
        compiled = njit(function, nogil=True)

    @wraps(function)
    def call(*arrays: NDArray[Any]) -> Any:
        try:
            return compiled(*arrays)
        except OSError:  # the disk is full: it is compiled by now, and only writing the cache has failed
            return compiled(*arrays)

    return call


@njit  # part of the kernels that call it, and cached with them
def _mix(position: Any, value: Any) -> tuple[Any, Any]:  # scalars inside compiled code
    h = (np.uint64(position) + _ONE) * _C0
    h ^= h >> _S32
    v = np.uint64(value)
    x = (v ^ h) * _C1
    x ^= x >> _S29
    x *= _C2
    x ^= x >> _S32
    y = (v + h) * _C3
    y ^= y >> _S31
    y *= _C4
    y ^= y >> _S30
    return x, y


@_compiled
def sum_flat(flat: NDArray[Any]) -> tuple[np.uint64, np.uint64]:
    """The digest's two lanes over a whole tensor. flat: (units,) unsigned."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for i in range(flat.size):
        x, y = _mix(i, flat[i])
        lane0 += x
        lane1 += y
    return lane0, lane1


@_compiled
def sum_at(positions: NDArray[np.uint64], values: NDArray[Any]) -> tuple[np.uint64, np.uint64]:
    """The digest's two lanes over some positions. positions: (n,) uint64; values: (n,) unsigned."""
    lane0 = np.uint64(0)
    lane1 = np.uint64(0)
    for i in range(values.size):
        x, y = _mix(positions[i], values[i])
        lane0 += x
        lane1 += y
    return lane0, lane1


_STRIDE = 512  # units compared at a time: most strides of a quiet tensor are skipped after one vectorised pass


@_compiled
def changed_positions(old: NDArray[Any], new: NDArray[Any]) -> NDArray[np.uint64]:
    """Where two tensors differ, ascending. old, new: (units,) unsigned; returns (n,) uint64."""
    per_stride = np.zeros((old.size + _STRIDE - 1) // _STRIDE, np.uint16)
    total = 0
    for block in range(per_stride.size):
        count = 0
        for i in range(block * _STRIDE, min((block + 1) * _STRIDE, old.size)):
            count += old[i] != new[i]
        per_stride[block] = count
        total += count
    positions = np.empty(total, np.uint64)
    at = 0
    for block in range(per_stride.size):
        if per_stride[block] == 0:
            continue
        for i in range(block * _STRIDE, min((block + 1) * _STRIDE, old.size)):
            if old[i] != new[i]:
                positions[at] = i
                at += 1
    return positions
