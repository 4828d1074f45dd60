"""`python -m bench.first_use`: seconds of the first and the second small step in this process, in every encoding, as JSON."""

import json
import sys
from time import perf_counter

import numpy as np

UNITS = 1 << 17  # enough for the compiled kernels to be used


def main() -> int:
    """Two times the same: diff, encode, decode, apply."""
    start = perf_counter()
    import pulse
    from pulse.bits import TensorBits
    from pulse.codec import ENCODINGS

    old = np.random.default_rng(0).integers(0x3C00, 0x3E00, UNITS, np.uint16)
    new = old + (np.arange(UNITS) % 100 == 0).astype(np.uint16)
    before, after = ({"w": TensorBits("BF16", (UNITS,), bits)} for bits in (old, new))
    took = []
    for _ in range(2):
        patch = pulse.diff(before, after)
        for encoding in ENCODINGS:
            pulse.apply(pulse.decode(pulse.encode(patch, base=before, encoding=encoding), base=before), before)
        took.append(perf_counter() - start)
        start = perf_counter()
    sys.stdout.write(json.dumps(took) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
