"""How kernels are compiled: without the GIL, and kept on disk where that is possible."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from numba import njit

_DAMAGED = (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError)  # what reading a spoiled cache ends in
_seconds: dict[str, float] = {}  # spent on first calls that had to compile, by kernel
_uncached: set[str] = set()  # kernels of which nothing is kept for the next process


def compile_seconds() -> float:
    """What compiling has cost this process so far; 0 if every kernel came from the cache."""
    return sum(_seconds.values())


def is_cached() -> bool:
    """Whether the next process will find what this one compiled."""
    return not _uncached


def piece(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only kernels call: it is compiled into them, and cached with them."""
    inner: Callable[..., Any] = njit(function, no_cpython_wrapper=True, error_model="numpy")
    return inner


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays and numbers, compiled at its first call for each dtype. It may raise nothing itself."""
    name = function.__qualname__

    def uncached() -> Any:
        _uncached.add(name)
        return njit(function, nogil=True, error_model="numpy")

    try:
        fast: Any = njit(function, nogil=True, cache=True, error_model="numpy")
    except RuntimeError:  # numba found no place where it may write its cache
        fast = uncached()
    if not hasattr(fast, "signatures"):  # NUMBA_DISABLE_JIT
        return function

    @wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal fast
        known = len(fast.signatures)
        started = time.perf_counter()
        try:
            result = fast(*arguments)
        except OSError:  # the disk is full: it is compiled by now, and only writing the cache has failed
            _uncached.add(name)
            result = fast(*arguments)
        except _DAMAGED:
            fast = uncached()
            result = fast(*arguments)
        if len(fast.signatures) > known and sum(fast.stats.cache_hits.values()) < len(fast.signatures):
            _seconds[name] = _seconds.get(name, 0.0) + time.perf_counter() - started
        return result

    return call
