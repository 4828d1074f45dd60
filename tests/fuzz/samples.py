"""Honest patches, payloads, manifests and indexes for the fuzzer to spoil."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from pulse import codec
from pulse.bits import TensorBits, dtype_of
from pulse.canonical import from_json, to_json
from pulse.codec import payload
from pulse.manifest import LateAnchor, Manifest, TensorIndex, anchor_key, head_bytes, manifest_key, parse_head
from pulse.patch import Part, Patch, TensorPatch, diff
from pulse.store import MemoryStore
from tests import rounds
from tests.chains import published


@dataclass(frozen=True)
class Sample:
    """A patch and the weights that it applies to."""

    blob: bytes
    base: dict[str, TensorBits]


@dataclass(frozen=True)
class Payload(Sample):
    """A payload and the anchor that it was made against; its pieces are named for their number and view."""

    gated: bool = True

    @property
    def anchor(self):
        """The anchor."""
        views = tuple(name.partition(" ")[2] for name in self.base)
        return payload.Anchor(tuple(bits.flat for bits in self.base.values()), views, self.gated)


def tensor(code, shape, units):
    """A tensor of these units."""
    return TensorBits(code, shape, np.array(units, np.uint64).astype(dtype_of(code).unsigned))


def small():
    """A few tensors of a few units, before and after: changed, added and removed."""
    old = {
        "a": tensor("BF16", (4, 5), range(20)),
        "b": tensor("F32", (7,), range(7)),
        "c": tensor("BF16", (6,), range(6)),
        "gone": tensor("U8", (2,), [1, 2]),
    }
    new = {
        "a": tensor("BF16", (4, 5), [*range(18), 500, 7]),
        "b": tensor("F32", (7,), [0, 9, *range(2, 7)]),
        "c": tensor("BF16", (6,), [0, 1, 2, 3, 4, 50000]),
        "new": tensor("I16", (2, 5), range(300, 310)),
    }
    return old, new


def trained(seed):
    """Tensors of several dtypes of which some per cent moved a little, and rows that were set to one number."""
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for code in ("BF16", "F32", "F64", "F8_E4M3", "U8", "I16"):
        shape = (200, 100) if code == "BF16" and seed else (40, 60)  # the larger one goes through the kernels
        flat = rng.integers(0, 256, math.prod(shape) * dtype_of(code).width, np.uint8).view(dtype_of(code).unsigned)
        old[code] = TensorBits(code, shape, flat)
        new[code] = old[code].copy()
        at = np.flatnonzero(rng.random(flat.size) < (0.06 if flat.size > 2400 else rng.choice([0.002, 0.02, 0.06])))
        new[code].flat[at] += rng.choice([1, 2, 300], at.size).astype(flat.dtype)
    new["F32"].flat[:600] = 0x3F800000
    return old, new


def sharded(old):
    """A patch in spans and boxes of the small tensors."""
    spec = old["a"].spec
    parts = [
        (Part("a", spec, box=((0, 2), (0, 5))), [1, 9]),
        (Part("a", spec, box=((2, 4), (1, 4))), [0, 5]),
        (Part("b", old["b"].spec, span=(2, 7)), [0, 4]),
        (Part("b", old["b"].spec, span=(0, 2)), []),
    ]
    changes = [
        TensorPatch(part, np.array(at, np.uint64), np.array([77] * len(at), dtype_of(part.spec.dtype).unsigned)) for part, at in parts
    ]
    return Patch(tuple(changes))


@cache
def patches():
    """Samples in every encoding."""
    old, new = small()
    found = [(old, diff(old, new), 8), (old, sharded(old), 8), *((pair[0], diff(*pair), 700) for pair in (trained(0), trained(1)))]
    return [
        Sample(codec.encode(patch, base, encoding=encoding, block=block), base)
        for base, patch, small_block in found
        for encoding in codec.ENCODINGS
        for block in (small_block, codec.patches.BLOCK)
    ]


@cache
def payloads():
    """Payloads in every value dtype: against a few weights, and against many, which go through the kernels."""
    found = []
    for views, units, share, block in ((("BF16", "F8_E4M3"), 60, 0.3, 25), (("BF16", "F16"), 40_000, 0.04, 15_000)):
        anchor, entries = rounds.made(len(found), units, views, share)
        pieces = {
            f"{i} {view}": TensorBits("F32", (piece.size,), piece) for i, (view, piece) in enumerate(zip(views, anchor.pieces, strict=True))
        }
        entries.values[::5] *= np.float32(1e4)
        for value_dtype in payload.DIGITS:
            sample = Payload(b"", pieces, gated=value_dtype != "float8")
            facts = {"round": 3, "rank": 1, "weight": [1, 2]}
            blob = payload.encode(entries, sample.anchor, value_dtype=value_dtype, facts=facts, block=block).blob
            found += [replace(sample, blob=blob)]
    return found


@cache
def documents():
    """What a store holds beside payloads: (its bytes, what reads them)."""
    store = MemoryStore()
    _, publisher, _ = published(store, 4, anchor_every=3)
    publisher.close()
    late = store.get(anchor_key(3))
    index = store.get(LateAnchor.from_bytes(late).tensors.key)
    manifests = [(settled(store.get(manifest_key(version))), Manifest.from_bytes) for version in range(4)]
    return [*manifests, (settled(late), LateAnchor.from_bytes), (index, TensorIndex.from_bytes), (head_bytes(3), parse_head)]


def settled(data):
    """A document with one and the same run, nonce and time, so that a case can be repeated."""
    value = from_json(data, "document")
    same = {"created": 0, "nonce": "0" * 32, "previous": value.get("previous") and "0" * 64, "run": "0" * 32}
    return to_json(value | {name: same[name] for name in same if name in value})
