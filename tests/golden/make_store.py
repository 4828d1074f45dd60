"""Makes the golden store of compressed anchors. It never overwrites: what was once written must be read for ever.

    .venv/bin/python tests/golden/make_store.py

`v0/compressed-anchors/` is a whole store: version 0 is a compressed anchor, version 1 a patch, version 2 a patch with a late anchor, which
is compressed, too. `v0/compressed-anchors-N.safetensors` is what version N is as a plain file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pulse import MemoryWeights, Publisher, checkpoint
from pulse.bits import TensorBits, dtype_of
from pulse.store import LocalStore

HERE = Path(__file__).parent / "v0"
NAME = "compressed-anchors"


def tensor(code, shape, units):
    """A tensor of these units."""
    return TensorBits(code, shape, np.array(units, np.uint64).astype(dtype_of(code).unsigned))


def weights():
    """Tensors of every width, most of them like weights: few exponents, any mantissa."""
    mantissas = [(i * 40503) % 128 for i in range(1024)]
    exponents = [120 - (i * i) % 11 // 3 for i in range(1024)]
    bf16 = [(i % 2) << 15 | exponent << 7 | mantissa for i, (exponent, mantissa) in enumerate(zip(exponents, mantissas, strict=True))]
    return {
        "embed.weight": tensor("BF16", (64, 16), bf16),
        "master": tensor("F32", (1024,), [unit << 16 | (i * 48271) % 65536 for i, unit in enumerate(bf16)]),
        "half": tensor("F16", (2, 3), [0x0000, 0x8000, 0x7C00, 0xFE01, 0x0001, 0x3C00]),
        "scale.f8": tensor("F8_E4M3", (300,), [i % 256 for i in range(300)]),
        "packed": tensor("F4", (2, 8), range(8)),
        "double": tensor("F64", (3,), [0x7FF8000000000001, 0x8000000000000000, 1]),
        "positions": tensor("I64", (512,), range(512)),
        "ones": tensor("BF16", (4096,), [0x3F80] * 4096),
        "zeros": tensor("BF16", (4096,), [0] * 4096),
        "empty.größe": tensor("U8", (0, 4), []),
        "scalar": tensor("I32", (), [-1 % 2**32]),
    }


def main():
    """Write the store, unless it is there."""
    if (HERE / NAME).exists():
        print(f"{NAME}: is there and stays")
        return
    held = MemoryWeights(weights())
    with Publisher(LocalStore(HERE / NAME), held, anchor_every=2, compress_anchors=True) as publisher:
        for version in range(3):
            held.tensors["embed.weight"].flat[version :: 100 * (version + 1)] ^= np.uint16(1 + version)
            publisher.publish(10 * version)
            with (HERE / f"{NAME}-{version}.safetensors").open("xb") as file:
                file.write(checkpoint.serialize(held.tensors))


if __name__ == "__main__":
    main()
