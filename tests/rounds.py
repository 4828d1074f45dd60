"""Anchors and the entries of rounds for tests: a slice of a real round, and made-up ones."""

from functools import cache
from pathlib import Path

import numpy as np

from pulse import checkpoint
from pulse.codec.payload import Anchor, Entries

DATA = Path(__file__).parent / "data" / "round"
VIEWS = ("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def bf16(values):
    """The bits of FP32 numbers rounded to BF16, to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


@cache
def real(rank=0):
    """(anchor, entries): what a trainer of the real round in tests/data/round sends."""
    anchor, local, feedback = (read(name) for name in ("anchor", f"local-{rank}", f"feedback-{rank}"))
    a, s = (np.concatenate(list(rows)) for rows in (anchor.values(), (feedback[n] + (anchor[n] - local[n]) for n in anchor)))
    at = np.flatnonzero(bf16(a) != bf16(a - s))
    return Anchor(tuple(row.view(np.uint32) for row in anchor.values()), ("BF16",) * len(anchor)), Entries(at.astype(np.uint64), s[at])


def read(name):
    """One file of the real round: name -> FP32 numbers."""
    return {tensor: bits.flat.view(np.float32) for tensor, bits in checkpoint.read(DATA / f"{name}.safetensors").items()}


def made(seed=0, units=20_000, views=("BF16",), share=0.04, gated=True):
    """Weights like a model's, and entries of about the size of a few steps of Adam."""
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal(units) * 0.05).astype(np.float32).view(np.uint32)
    at = np.flatnonzero(rng.random(units) < share)
    values = (rng.standard_normal(at.size) * 1e-4).astype(np.float32)
    values[values == 0] = 1e-4
    return Anchor(tuple(np.array_split(weights, len(views))), views, gated), Entries(at.astype(np.uint64), values)
