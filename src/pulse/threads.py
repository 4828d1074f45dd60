"""Work that is spread over threads: kernels, zstd and SHA-256 let go of the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_MOST = 8  # more threads than this wait for memory, not for each other

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable(threads: int | None) -> int:
    """How many threads to use: as many as asked for, or else the cores that this process may use, up to eight."""
    if threads is None:
        return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST)
    if threads < 1:
        raise ValueError(f"threads={threads}; 1 or more are possible")
    return threads


def each(function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None) -> Iterator[Result]:
    """`map`, over several threads; results in order. The first error ends it, in the caller."""
    items = list(items)
    workers = min(usable(threads), len(items))
    if workers <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(workers, "pulse") as pool:
        yield from pool.map(function, items)  # cancels what has not begun if one fails
