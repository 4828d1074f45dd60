"""Compiled twins of the plain functions, proven equal to them by `tests/property/test_kernels.py`.

Each runs without the GIL. The first call of each, per width, compiles it (some seconds for all of them together); the result is cached on
disk, and where no cache can be written it is compiled again in each process.
"""

from pulse.kernels.cells import levels
from pulse.kernels.changes import changed_positions, scatter
from pulse.kernels.classes import rank, select
from pulse.kernels.coder import decode, encode
from pulse.kernels.compiled import compile_seconds, is_cached
from pulse.kernels.digests import sum_at, sum_flat
from pulse.kernels.interval import FULL, MALFORMED
from pulse.kernels.values import decode_values, encode_values

__all__ = [
    "FULL",
    "MALFORMED",
    "changed_positions",
    "compile_seconds",
    "decode",
    "decode_values",
    "encode",
    "encode_values",
    "is_cached",
    "levels",
    "rank",
    "scatter",
    "select",
    "sum_at",
    "sum_flat",
]
