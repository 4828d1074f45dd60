"""Every step that small dtypes have, and every dtype, cut and block size, through every encoding."""

from itertools import product

import numpy as np
import pytest

from pulse import codec
from pulse.bits import DTYPES, Spec, TensorBits, dtype_of, steps_between
from pulse.codec import contextual
from pulse.codec.classes import Classes, exponents_of
from pulse.codec.lanes import BLOCK, lanes_of
from pulse.patch import Part, Patch, TensorPatch, apply, apply_bits, diff, relate

EIGHT_BITS = [name for name, dtype in DTYPES.items() if dtype.width == 1]


def bases(code):
    """64 patterns of a 16-bit float: zeros, denormals, infinities, NaNs with payloads, the borders of exponents; of both signs."""
    mantissa = dtype_of(code).mantissa
    one, infinite = 1 << mantissa, (1 << 15) - (1 << mantissa)
    borders = [
        exponent * one + offset
        for exponent in (2, exponents_of(dtype_of(code)) // 2, exponents_of(dtype_of(code)) - 2)
        for offset in (-1, 0, 1)
    ]
    special = [0, 1, 2, one - 1, one, one + 1, infinite - 1, infinite, infinite + 1, infinite + one // 2, (1 << 15) - 1]
    positive = list(dict.fromkeys([*special, *borders]))
    drawn = np.random.default_rng(mantissa).permutation(1 << 15).tolist()
    positive += [pattern for pattern in drawn if pattern not in positive][: 32 - len(positive)]
    return np.array([sign << 15 | pattern for pattern in positive for sign in (0, 1)], "<u2")


def pairs(code):
    """(old, new), flat: each base beside every target, in no order."""
    dtype = dtype_of(code)
    every = np.random.default_rng(1).permutation(1 << 8 * dtype.width).astype(dtype.unsigned)
    starts = bases(code) if dtype.width == 2 else every
    times = 3 if code.startswith("F6") else 1  # so that whole elements fill the bytes
    return np.repeat(starts, times * every.size), np.tile(every, times * starts.size)


@pytest.mark.parametrize("code", ["BF16", "F16", *EIGHT_BITS])
def test_every_base_goes_to_every_target_in_every_encoding(code):
    old, new = pairs(code)
    spec = Spec(code, (8 * old.nbytes // dtype_of(code).bits,))
    positions = np.flatnonzero(old != new).astype(np.uint64)
    assert positions.size == old.size - old.size // (1 << 8 * old.itemsize)
    before, after = {"w": TensorBits(code, spec.shape, old)}, {"w": TensorBits(code, spec.shape, new)}
    patch = Patch((TensorPatch(Part("w", spec), positions, new[positions]),))
    for encoding in codec.ENCODINGS:
        found = codec.decode(codec.encode(patch, before, encoding=encoding), before)
        assert found == patch
        assert apply_bits(found, before) == after


@pytest.mark.parametrize("code", ["BF16", "F16", *EIGHT_BITS])
def test_every_base_goes_to_every_target_through_the_entropy_coder_with_as_many_classes_as_there_can_be(code):
    old, new = pairs(code)
    dtype = dtype_of(code)
    spec = Spec(code, (8 * old.nbytes // dtype.bits,))
    (lane,) = lanes_of([Part("w", spec)])
    exponents = exponents_of(dtype)
    classes = Classes(tuple(range(1, exponents, max(1, exponents // 15)))[:15], (1,) * min(16, exponents))
    classes.check(exponents_of(dtype))
    positions = np.flatnonzero(old != new).astype(np.uint64)
    steps = steps_between(old[positions], new[positions], dtype)
    block = lane, (0, old.size)

    def base(name):
        return TensorBits(code, spec.shape, old)

    section = contextual.encode_ranks(*block, positions, steps, classes, base)
    found, bits = contextual.decode_ranks(*block, positions.size, memoryview(section), classes, base)
    assert np.array_equal(found, positions)
    assert np.array_equal(bits, new[positions])


def cuts(spec):
    """Ways to cut a tensor into parts: whole, spans, boxes of rows and columns."""
    yield [Part("w", spec)]
    yield [Part("w", spec, span=pair) for pair in [(0, 1), (1, 1000), (1000, 1000), (1000, spec.units)]]
    if not dtype_of(spec.dtype).bits % 8:
        rows, columns = spec.shape
        yield [Part("w", spec, box=box) for box in product([(0, 13), (13, rows)], [(0, 1), (1, 50), (50, columns)])]


def pieces(patch, parts):
    """The same changes, listed by parts."""
    (change,) = patch.changes
    for part in parts:
        inside = part.locate(np.arange(part.units, dtype=np.uint64))
        held = np.flatnonzero(np.isin(inside, change.positions)).astype(np.uint64)
        values = change.values[np.searchsorted(change.positions, inside[held])]
        yield TensorPatch(part, held, values)


@pytest.mark.parametrize("share", [0.004, 0.45])
@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_density_cut_and_block_size_comes_back_in_every_encoding(code, share):
    rng = np.random.default_rng([len(code), int(share * 1000)])
    spec = Spec(code, (40, 64))
    flat = rng.integers(0, 256, spec.nbytes, np.uint8)
    if share < 0.4:  # small numbers, as weights are
        flat = np.minimum(flat, rng.integers(0, 256, spec.nbytes, np.uint8) & 0x3F).astype(np.uint8)
    old = {"w": TensorBits(code, spec.shape, flat.view(dtype_of(code).unsigned))}
    new = {"w": old["w"].copy()}
    chosen = np.flatnonzero(rng.random(spec.units) < share)
    chosen = chosen if chosen.size else np.array([spec.units - 1])
    new["w"].flat[chosen] += rng.choice([1, 2, 77], chosen.size).astype(dtype_of(code).unsigned)
    whole = diff(old, new)
    for parts in cuts(spec):
        patch = Patch(tuple(pieces(whole, parts)), base=whole.base, result=whole.result)
        for encoding, block in product(codec.ENCODINGS, [50, 513, BLOCK]):
            blob = codec.encode(patch, old, encoding=encoding, block=block, threads=1 + block % 2)
            assert codec.decode(blob, old, threads=1 + block % 3) == patch
        assert apply(codec.decode(blob, old), old) == new
        related = relate(patch, old)
        assert codec.decode(codec.encode(related, old, encoding="contextual", block=64), old) == patch
