"""Makes the golden patches of format version 0. It never overwrites: what was once written must decode for ever.

    .venv/bin/python tests/golden/make.py

Each `NAME.pulse` is one patch; `NAME.json` says what it decodes to, in plain numbers; a contextual one is decoded beside `base_of` it.
"""

import json
from pathlib import Path

import numpy as np

from pulse import codec
from pulse.bits import TensorBits, dtype_of
from pulse.codec.lanes import BLOCK
from pulse.patch import Part, Patch, TensorPatch, diff, relate, resolve

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


def scattered(count, bits):
    """So many numbers of that many bits that look random, and are the same everywhere."""
    return [(i * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> (64 - bits) for i in range(1, count + 1)]


def trained():
    """Weights whose small numbers change often and whose large ones seldom, before and after, in dtypes that have classes and that have none."""
    old, new = {}, {}
    for code in ("BF16", "F32", "F16", "F64", "F8_E4M3", "F8_E5M2", "I8", "U16", "BOOL", "F4"):
        dtype = dtype_of(code)
        shape = (40, 120) if code in ("BF16", "F32") else (12, 60)
        units = scattered(shape[0] * shape[1] * dtype.bits // (8 * dtype.width), 8 * dtype.width)
        if dtype.is_float:  # eight exponents, below one
            units = [u & ~(7 << dtype.width * 8 - 4) & ~(8 << dtype.mantissa) | 8 << dtype.width * 8 - 6 for u in units]
        old[code] = tensor(code, shape, units)
        new[code] = old[code].copy()
        exponents = (old[code].flat >> dtype.unsigned.type(dtype.mantissa or 0)).astype(np.uint64) & np.uint64(7)
        draws = np.array(scattered(2 * len(units), 16)[len(units) :], np.uint64)
        at = np.flatnonzero(draws < np.uint64(1 << 15) >> exponents)
        new[code].flat[at] += (1 - 2 * (at % 3 == 0)).astype(dtype.unsigned) * (1 + 90 * (at % 17 == 0)).astype(dtype.unsigned)
    return old, new


def rows():
    """Rows that were all set to one number: gaps and steps, where ranks do not pay."""
    old = {"w": tensor("F32", (64, 32), [0x3F000000 + n for n in range(2048)])}
    new = {"w": old["w"].copy()}
    new["w"].flat[320:640] = new["w"].flat[1600:1800] = 0
    return old, new


def base_of(name):
    """The weights that a golden patch applies to."""
    return trained()[0] if name.startswith("contextual-trained") else rows()[0] if name == "contextual-rows" else OLD


def patches():
    """What is made: name -> (patch, encoding, units per block)."""
    full, steps = diff(OLD, NEW), diff(*trained())
    return {
        "portable": (relate(full, OLD), "portable", BLOCK),
        "portable-blocks-of-7": (relate(full, OLD), "portable", 7),
        "absolute": (full, "absolute", BLOCK),
        "absolute-blocks-of-7": (full, "absolute", 7),
        "portable-shards": (shards(), "portable", 32),
        "nothing": (diff(OLD, OLD), "absolute", BLOCK),
        "contextual": (full, "contextual", BLOCK),
        "contextual-blocks-of-7": (full, "contextual", 7),
        "contextual-shards": (shards(), "contextual", 32),
        "contextual-nothing": (diff(OLD, OLD), "contextual", BLOCK),
        "contextual-rows": (diff(*rows()), "contextual", BLOCK),
        "contextual-trained": (steps, "contextual", BLOCK),
        "contextual-trained-blocks-of-100": (steps, "contextual", 100),
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


def bases():
    """The weights that the golden patches apply to, for readers in other languages: file name -> tensors."""
    return {"base-trained": trained()[0], "base-rows": rows()[0], "base-others": OLD}


def main():
    """Write every golden file that is not there yet."""
    HERE.mkdir(exist_ok=True)
    for name, tensors in bases().items():
        if not (HERE / f"{name}.json").exists():
            text = {key: {"dtype": bits.dtype, "shape": list(bits.shape), "units": bits.flat.tolist()} for key, bits in tensors.items()}
            (HERE / f"{name}.json").write_text(json.dumps(text), encoding="utf-8")
    for name, (patch, encoding, block) in patches().items():
        blob, text = HERE / f"{name}.pulse", HERE / f"{name}.json"
        if blob.exists() or text.exists():
            print(f"{name}: is there and stays")
            continue
        with blob.open("xb") as file:
            file.write(codec.encode(patch, base_of(name), encoding=encoding, block=block))
        with text.open("x", encoding="utf-8") as file:
            json.dump(described(resolve(patch, base_of(name)) if encoding == "contextual" else patch), file, indent=1, ensure_ascii=False)
        print(f"{name}: {blob.stat().st_size} bytes")


if __name__ == "__main__":
    main()
