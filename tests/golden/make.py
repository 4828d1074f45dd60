"""Makes the golden patches of format version 0. It never overwrites: what was once written must decode for ever.

    .venv/bin/python tests/golden/make.py

Each `NAME.pulse` is one patch; `NAME.json` says what it decodes to, in plain numbers.
"""

import json
from pathlib import Path

import numpy as np

from pulse import codec
from pulse.bits import TensorBits, dtype_of
from pulse.codec.lanes import BLOCK
from pulse.patch import Part, Patch, TensorPatch, diff, relate

HERE = Path(__file__).parent / "v0"


def tensor(code, shape, units):
    """A tensor of these units."""
    return TensorBits(code, shape, np.array(units, np.uint64).astype(dtype_of(code).unsigned))


OLD = {
    "embed.weight": tensor("BF16", (8, 16), [0x3C00 + 7 * i for i in range(128)]),
    "head.bias": tensor("F32", (5,), [0x00000000, 0x80000000, 0x3F800000, 0x7FC00001, 0xFF800000]),
    "counter": tensor("I64", (), [41]),
    "flags": tensor("BOOL", (9,), [0, 1, 0, 1, 0, 1, 0, 1, 0]),
    "scale.f8": tensor("F8_E4M3", (6,), [0x00, 0x80, 0x38, 0x7E, 0x7F, 0xFF]),
    "packed": tensor("F4", (2, 8), range(8)),
    "gone": tensor("U16", (2,), [1, 2]),
    "reshaped": tensor("F16", (2, 3), range(6)),
}
NEW = {
    "embed.weight": tensor("BF16", (8, 16), [0x3C00 + 7 * i + (1 if i % 9 == 4 else 0) - (300 if i == 100 else 0) for i in range(128)]),
    "head.bias": tensor("F32", (5,), [0x80000000, 0x80000000, 0x3F800000, 0x7FC00002, 0xFF800000]),
    "counter": tensor("I64", (), [42]),
    "flags": tensor("BOOL", (9,), [1, 1, 0, 1, 0, 1, 0, 0, 0]),
    "scale.f8": tensor("F8_E4M3", (6,), [0x80, 0x80, 0x38, 0x7F, 0x7F, 0xFF]),
    "packed": tensor("F4", (2, 8), [0, 1, 2, 3, 0xF4, 5, 6, 7]),
    "reshaped": tensor("F16", (3, 2), range(6)),
    "new.größe": tensor("C64", (3,), [1, 2**64 - 1, 0x3F8000003F800000]),
    "empty": tensor("U8", (0, 4), []),
}


def shards():
    """A patch cut as shards and ranges are: boxes and spans, one of them without a change."""
    embed, bias = OLD["embed.weight"].spec, OLD["head.bias"].spec

    def part(name, spec, at, steps, **place):
        return TensorPatch(
            Part(name, spec, **place), np.array(at, np.uint64), np.array(steps, np.int64).astype(dtype_of(spec.dtype).unsigned)
        )

    changes = (
        part("embed.weight", embed, [0, 9, 31], [1, -1, 200], box=((0, 8), (0, 4))),
        part("embed.weight", embed, [], [], box=((0, 8), (4, 8))),
        part("embed.weight", embed, [5, 63], [2, -32768], box=((0, 8), (8, 16))),
        part("head.bias", bias, [0, 1], [-1, 1], span=(0, 3)),
        part("head.bias", bias, [1], [123456], span=(3, 5)),
    )
    return Patch(changes, values="steps")


def patches():
    """What is made: name -> (patch, encoding, units per block)."""
    full = diff(OLD, NEW)
    return {
        "portable": (relate(full, OLD), "portable", BLOCK),
        "portable-blocks-of-7": (relate(full, OLD), "portable", 7),
        "absolute": (full, "absolute", BLOCK),
        "absolute-blocks-of-7": (full, "absolute", 7),
        "portable-shards": (shards(), "portable", 32),
        "nothing": (diff(OLD, OLD), "absolute", BLOCK),
    }


def described(patch):
    """A patch in plain numbers."""
    return {
        "values": patch.values,
        "base": patch.base,
        "result": patch.result,
        "removed": list(patch.removed),
        "changes": [
            {
                "name": change.part.name,
                "dtype": change.part.spec.dtype,
                "shape": list(change.part.spec.shape),
                "box": change.part.box and [list(pair) for pair in change.part.box],
                "span": change.part.span and list(change.part.span),
                "positions": change.positions.tolist(),
                "values": change.values.tolist(),
            }
            for change in patch.changes
        ],
        "whole": {
            name: {"dtype": bits.dtype, "shape": list(bits.shape), "units": bits.flat.tolist()} for name, bits in patch.whole.items()
        },
    }


def main():
    """Write every golden file that is not there yet."""
    HERE.mkdir(exist_ok=True)
    for name, (patch, encoding, block) in patches().items():
        blob, text = HERE / f"{name}.pulse", HERE / f"{name}.json"
        if blob.exists() or text.exists():
            print(f"{name}: is there and stays")
            continue
        with blob.open("xb") as file:
            file.write(codec.encode(patch, encoding=encoding, block=block))
        with text.open("x", encoding="utf-8") as file:
            json.dump(described(patch), file, indent=1, ensure_ascii=False)
        print(f"{name}: {blob.stat().st_size} bytes")


if __name__ == "__main__":
    main()
