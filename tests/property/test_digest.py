"""The state digest: fixed numbers, any order, updates in O(changed), and nothing swapped goes unseen."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pulse import digest
from pulse.bits import Spec, TensorBits, dtype_of
from pulse.digest import ZERO, Sum, digest_of, flat_sum, mix_sum, plain_flat_sum, state_digest, tensor_sums
from pulse.errors import DigestMismatch
from pulse.patch import diff
from pulse.testing import strategies as some


def tensor(code, shape, units):
    return TensorBits(code, shape, np.array(units, np.uint64).astype(dtype_of(code).unsigned))


# Quoted in docs/format.md. Units are given as numbers, so that the vectors hold for any implementation.
VECTORS = [
    ({}, "1f6a9d7ef53c39ccfe6f0dcca2f10d60"),
    ({"w": tensor("F32", (2,), [0x3F800000, 0x80000000])}, "a77207c4c273c7d894a5205823cc90ae"),
    (
        {"norm": tensor("BF16", (3,), [0x3F80, 0x8000, 0x7FC1]), "head.weight": tensor("I64", (), [0xFFFFFFFFFFFFFFFF])},
        "68da6182abaf83cad64e1bad42af3b34",
    ),
]
SUMS = [
    ([], "00000000000000000000000000000000"),
    ([0], "45388e6eb6e2be4d2e5cbca75d009245"),
    ([0x3F80, 0x8000, 0x7FC1], "ead8d8d62e67a3740b319210b28c6593"),
    ([0xFFFFFFFFFFFFFFFF], "720b09a32756e64d3d4947ecf113dfb7"),
]


def by_the_book(units, start=0):
    """The lanes as the module's text defines them, in plain integers."""
    mask, lane0, lane1 = (1 << 64) - 1, 0, 0
    for p, v in enumerate(units, start):
        h = (p + 1) * 0x9E3779B97F4A7C15 & mask
        h ^= h >> 32
        x = (v ^ h) * 0xBF58476D1CE4E5B9 & mask
        x ^= x >> 29
        x = x * 0x94D049BB133111EB & mask
        x ^= x >> 32
        y = ((v + h) & mask) * 0xFF51AFD7ED558CCD & mask
        y ^= y >> 31
        y = y * 0xC4CEB9FE1A85EC53 & mask
        y ^= y >> 30
        lane0, lane1 = lane0 + x & mask, lane1 + y & mask
    return Sum(lane0, lane1)


@pytest.mark.parametrize(("weights", "expected"), VECTORS)
def test_the_published_vectors_hold(weights, expected):
    assert digest_of(weights) == expected


@pytest.mark.parametrize(("units", "expected"), SUMS)
def test_the_published_sums_hold(units, expected):
    assert flat_sum(np.array(units, np.uint64)).hex == by_the_book(units).hex == expected


def test_the_digest_is_sha256_over_a_line_per_tensor():
    _, expected = VECTORS[2]
    lines = [
        f"11:head.weight I64 [] {by_the_book([(1 << 64) - 1]).hex}\n",
        f"4:norm BF16 [3] {by_the_book([0x3F80, 0x8000, 0x7FC1]).hex}\n",
    ]
    assert hashlib.sha256("".join(["pulse state digest 0\n", *lines]).encode()).hexdigest()[:32] == expected


@given(some.tensors())
def test_the_sum_is_what_its_definition_says(bits):
    assert flat_sum(bits.flat) == by_the_book(bits.flat.tolist())


@given(some.weights(), st.randoms())
def test_the_order_of_tensors_does_not_matter(weights, random):
    names = list(weights)
    random.shuffle(names)
    assert digest_of({name: weights[name] for name in names}) == digest_of(weights)


@given(some.tensors(), st.data())
def test_sums_of_pieces_in_any_order_add_up_to_the_sum_of_the_whole(bits, data):
    positions = np.arange(bits.flat.size, dtype=np.uint64)
    order = np.array(data.draw(st.permutations(range(bits.flat.size))), np.int64)
    cut = data.draw(st.integers(0, bits.flat.size))
    pieces = [mix_sum(positions[piece], bits.flat[piece]) for piece in (order[:cut], order[cut:])]
    assert pieces[0] + pieces[1] == flat_sum(bits.flat)


@given(some.sequences(2))
def test_updating_the_sums_where_something_changed_gives_those_of_the_new_weights(pair):
    old, new = pair
    patch = diff(old, new)
    sums = tensor_sums(old)
    for change in patch.changes:
        name, at = change.part.name, change.located
        sums[name] = sums[name] - mix_sum(at, old[name].flat[at]) + mix_sum(at, new[name].flat[at])
    sums = {name: total for name, total in sums.items() if name not in patch.removed}
    sums |= {name: flat_sum(bits.flat) for name, bits in patch.whole.items()}
    assert sums == tensor_sums(new)
    assert state_digest({name: bits.spec for name, bits in new.items()}, sums) == digest_of(new)


@given(some.tensors(), st.data())
def test_one_wrong_bit_shows_in_both_lanes(bits, data):
    assume(bits.flat.size)
    wrong = bits.copy()
    wrong.flat[data.draw(st.integers(0, bits.flat.size - 1))] ^= 1 << data.draw(st.integers(0, 8 * bits.flat.itemsize - 1))
    before, after = flat_sum(bits.flat), flat_sum(wrong.flat)
    assert before.lane0 != after.lane0
    assert before.lane1 != after.lane1


@given(some.tensors(), st.data())
def test_swapping_two_different_values_shows(bits, data):
    values, first = np.unique(bits.flat, return_index=True)
    assume(values.size > 1)
    i, j = data.draw(st.permutations(first))[:2]
    swapped = bits.copy()
    swapped.flat[[i, j]] = bits.flat[[j, i]]
    assert digest_of({"w": swapped}) != digest_of({"w": bits})


@given(some.tensors())
def test_shifting_reversing_or_extending_by_zeros_shows(bits):
    for moved in (np.roll(bits.flat, 1), bits.flat[::-1], np.append(bits.flat, bits.flat.dtype.type(0))):
        if not np.array_equal(moved, bits.flat):
            assert flat_sum(np.ascontiguousarray(moved)) != flat_sum(bits.flat)


@given(some.tensors(Spec("F32", (2, 3))), some.tensors(Spec("F32", (2, 3))))
def test_swapped_tensors_renamed_tensors_and_other_dtypes_or_shapes_show(a, b):
    here = digest_of({"a": a, "b": b})
    assert (digest_of({"a": b, "b": a}) == here) == (a == b)
    assert digest_of({"a": a, "c": b}) != here
    assert digest_of({"a": a}) != here
    assert digest_of({"a": a, "b": replace(b, shape=(3, 2))}) != here
    assert digest_of({"a": a, "b": replace(b, shape=(6,))}) != here
    assert digest_of({"a": a, "b": replace(b, dtype="I32")}) != here


def test_both_zeros_and_nans_of_other_payloads_show():
    digests = {digest_of({"w": tensor("F32", (1,), [units])}) for units in (0, 1 << 31, 0x7FC00000, 0x7FC00001, 0xFFC00000)}
    assert len(digests) == 5


def test_names_cannot_be_moved_into_each_other():
    one = tensor("U8", (1,), [1])
    assert digest_of({"a": one, "b": one}) != digest_of({"a U8 [1]": one, "b": one})
    assert digest_of({"a\n1:b": one}) != digest_of({"a": one, "b": one})


def test_a_plain_sum_does_not_depend_on_how_it_is_cut_into_passes(monkeypatch):
    flat = np.random.default_rng(0).integers(0, 1 << 16, 3000, np.uint16)
    whole = plain_flat_sum(flat)
    monkeypatch.setattr(digest, "_CHUNK", 7)
    assert plain_flat_sum(flat) == whole == by_the_book(flat.tolist())


@given(st.tuples(*[st.integers(0, (1 << 64) - 1)] * 4))
def test_sums_add_and_subtract_modulo_2_to_the_64_and_survive_their_text(lanes):
    a, b = Sum(*lanes[:2]), Sum(*lanes[2:])
    assert a + b - b == a
    assert a - a == ZERO
    assert a + ZERO == a
    assert Sum.from_hex(a.hex) == a
    assert len(a.hex) == 32


def test_a_check_that_fails_names_the_thing_and_both_digests():
    digest.check("payload x", "aa", "aa")
    with pytest.raises(DigestMismatch, match=r"payload x: expected digest aa, found bb"):
        digest.check("payload x", "aa", "bb")


def test_sha256_runs_over_its_pieces_in_turn():
    assert digest.sha256(b"ab", memoryview(b"c")) == hashlib.sha256(b"abc").hexdigest()
