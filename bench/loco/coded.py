"""What the entries of one payload cost, written in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from pulse.codec.payload import DIGITS, Entries, encode, read
from pulse.torch.loco.layout import Layout
from pulse.torch.loco.methods import Part, anchor_bits, entries_of

WAYS = {
    "int64 + FP32": "as one-covenant/grail sends them",
    "int32 + FP32": "",
    "byte gap + FP32": "one byte per gap, 255 for 255 more",
    "byte gap + FP32, zstd-1": "gaps, and values as four planes, each compressed",
    "pulse, float32": "lossless",
    "pulse, bfloat16": "8 significant bits of a move",
    "pulse, float8": "4 significant bits of a move",
}


def costs(parts: Sequence[Part], anchor: Sequence[Tensor], layout: Layout) -> dict[str, Any]:
    """Bytes of these entries in each of `WAYS`, and of the positions alone in a payload; all framing of a payload included."""
    entries = entries_of(parts, layout)
    known = anchor_bits(anchor, layout, gated=True)
    found: dict[str, Any] = {"entries": entries.positions.size, **plain(entries)}
    for value_dtype in DIGITS:
        blob = encode(entries, known, value_dtype=value_dtype).blob
        found[f"pulse, {value_dtype}"] = len(blob)
        found["positions"] = sum(len(section) for section in read(blob)[1][::2])
    return found


def plain(entries: Entries) -> dict[str, int]:
    """The ways that need no anchor."""
    n = entries.positions.size
    gaps = _byte_gaps(entries.positions)
    planes = np.ascontiguousarray(entries.values.view(np.uint8).reshape(-1, 4).T)
    packed = sum(len(zstandard.compress(plane.tobytes(), 1)) for plane in (gaps, *planes))
    return {"int64 + FP32": 12 * n, "int32 + FP32": 8 * n, "byte gap + FP32": gaps.size + 4 * n, "byte gap + FP32, zstd-1": packed}


def _byte_gaps(positions: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Entries that lie between, one byte each, after as many 255 as go into it."""
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    whole, rest = np.divmod(gaps, 255)
    found = np.full(gaps.size + int(whole.sum()), 255, np.uint8)
    found[np.cumsum(whole + 1) - 1] = rest
    return found
