"""Makes the golden payloads of format version 0. It never overwrites: what was once written must decode for ever.

    .venv/bin/python tests/golden/make_payloads.py

Each `NAME.pulse` in v0/payloads is one payload; `NAME.json` says what it decodes to, in plain numbers, beside the anchor that it was made
against: pieces of FP32 bits, and the view of each.
"""

import json
from pathlib import Path

import numpy as np

from pulse.codec import payload
from pulse.codec.lanes import BLOCK
from pulse.codec.payload import Anchor, Entries

HERE = Path(__file__).parent / "v0" / "payloads"
VIEWS = ("BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F32")
ODD = [0, 1 << 31, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F808000, 0x3F818000, 0xBF808000, 0x7F7FFFFF, 0x7F800000, 0xFFC00001]
ODD += [0x38800000, 0x387FE000, 0x3C800000, 0x3C880000, 0x3A800000, 0x3A7FFFFF, 0x37000000, 0x43E80000]  # where views begin and end


def scattered(count, seed=0):
    """So many numbers of 32 bits that look random, and are the same everywhere."""
    return [((i + 7919 * seed) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 32 for i in range(1, count + 1)]


def anchor(views=VIEWS, gated=True):
    """150 weights for each view: most from 2^-10 to 2^-3, some odd."""
    pieces = []
    for seed, _ in enumerate(views):
        weights = [bits & 0x80FFFFFF | (117 + (bits >> 24 & 7)) << 23 for bits in scattered(150, seed)]
        weights[:: 150 // len(ODD)] = ODD + weights[len(ODD) * (150 // len(ODD)) :: 150 // len(ODD)]
        pieces.append(np.array(weights, np.uint32))
    return Anchor(tuple(pieces), tuple(views), gated)


def entries(of, share=3):
    """Every so manyth weight: most move by 2^-15 to 2^-6 to a number of FP32, some far, some by what is no move."""
    weights = np.concatenate(of.pieces)
    at = [i for i in range(weights.size) if scattered(1, i)[0] % share == 0]
    bits = [bits & 0x807FFFFF | (112 + (bits >> 23 & 15) % 10) << 23 for bits in scattered(len(at), 99)]
    bits[::17] = [some & 0x80FFFFFF | 0x3F000000 for some in bits[::17]]
    wanted, held = np.array(bits, np.uint32).view(np.float32), weights[at].view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        values = held - (held - wanted)
    values = np.where(np.isfinite(values), values, wanted)
    values[::19] = wanted[::19]
    return Entries(np.array(at, np.uint64), values)


def payloads():
    """What is made: name -> (entries, anchor, value dtype, weights per block)."""
    full, bf16 = anchor(), anchor(("BF16",) * 4)
    loose = anchor(gated=False)
    return {
        "float32": (entries(full), full, "float32", BLOCK),
        "bfloat16": (entries(full), full, "bfloat16", BLOCK),
        "float8": (entries(full), full, "float8", BLOCK),
        "float32-blocks-of-100": (entries(full), full, "float32", 100),
        "ungated": (entries(loose), loose, "float32", BLOCK),
        "ungated-float8": (entries(loose), loose, "float8", 333),
        "bf16-all": (entries(bf16, 1), bf16, "float32", BLOCK),
        "bf16-few": (entries(bf16, 40), bf16, "bfloat16", BLOCK),
        "nothing": (payload.NOTHING, bf16, "float32", BLOCK),
        "no-weights": (payload.NOTHING, Anchor((), ()), "float32", BLOCK),
    }


def described(found, of, facts):
    """A payload in plain numbers."""
    return {
        "facts": facts,
        "gated": of.gated,
        "views": list(of.views),
        "pieces": [piece.tolist() for piece in of.pieces],
        "positions": found.positions.tolist(),
        "values": found.values.view(np.uint32).tolist(),
    }


def main():
    """Write every golden file that is not there yet."""
    HERE.mkdir(parents=True, exist_ok=True)
    for name, (held, of, value_dtype, block) in payloads().items():
        blob, text = HERE / f"{name}.pulse", HERE / f"{name}.json"
        if blob.exists() or text.exists():
            print(f"{name}: is there and stays")
            continue
        facts = {"name": name, "round": 3}
        made = payload.encode(held, of, value_dtype=value_dtype, facts=facts, block=block)
        with blob.open("xb") as file:
            file.write(made.blob)
        with text.open("x", encoding="utf-8") as file:
            json.dump(described(held._replace(values=made.sent), of, facts), file)
        print(f"{name}: {blob.stat().st_size} bytes, {held.positions.size} entries")


if __name__ == "__main__":
    main()
