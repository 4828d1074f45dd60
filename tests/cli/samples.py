"""What the command line's tests feed it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pulse.bits import TensorBits

PULSE = Path(sys.executable).with_name("pulse")


def weights(seed: int, changed: float = 1.0, base: dict[str, TensorBits] | None = None) -> dict[str, TensorBits]:
    """A small model's worth of bits; with `base`, that one with some of its units one step further."""
    rng = np.random.default_rng(seed)
    if base is None:
        shapes = {"embed.weight": (64, 32), "layer.weight": (96, 48), "norm.weight": (48,)}
        return {
            name: TensorBits("BF16", shape, rng.integers(0, 1 << 15, int(np.prod(shape)), dtype=np.uint16))
            for name, shape in shapes.items()
        }
    return {
        name: TensorBits(bits.dtype, bits.shape, bits.flat + (rng.random(bits.flat.size) < changed).astype(np.uint16))
        for name, bits in base.items()
    }
