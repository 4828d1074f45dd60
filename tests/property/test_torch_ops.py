"""The torch operations give the very bits that numpy and the compiled kernels give, for every dtype, width and cut into chunks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse import bits as plain
from pulse import digest
from pulse.bits import DTYPES, TensorBits, dtype_of
from pulse.errors import WeightsMismatch
from pulse.kernels import changes, classes, digests
from pulse.testing import strategies as some
from pulse.torch import ops
from pulse.torch.tensors import bits_tensor, host_integers

CODES = sorted(set(DTYPES) - {"F6_E2M3", "F6_E3M2"})  # torch has no other dtypes
CUTS = {1: [1, 9, 100, 200], 2: [1, 0x3C00, 0x7F80, 0x9000], 4: [1, 1 << 30, 0x7F800000, 0x90000000], 8: [1, 1 << 62, 0x7FF << 52, 9 << 60]}
FEW, MANY = 7, 1 << 20  # units per pass

tensors = st.sampled_from(CODES).map(dtype_of).flatmap(some.specs).flatmap(some.tensors)
passes = st.sampled_from([1, FEW, MANY])


@pytest.fixture(params=[FEW, MANY])
def chunk(request, monkeypatch):
    monkeypatch.setattr(ops, "_CHUNK", request.param)


def random_bits(code, units, seed=0):
    """A tensor of arbitrary bits, most of its magnitudes small."""
    unsigned = dtype_of(code).unsigned
    generator = np.random.default_rng([units, seed])
    flat = generator.integers(0, 1 << 8 * unsigned.itemsize, units, unsigned)
    flat[generator.random(units) < 0.7] &= unsigned.type(15)
    return TensorBits(code, (8 * flat.nbytes // dtype_of(code).bits,), flat)


def some_positions(units, share, seed=0):
    return np.flatnonzero(np.random.default_rng([units, seed]).random(units) < share)


def as_units(tensor):
    """Integers of torch as the unsigned units that they stand for."""
    array = tensor.numpy()
    return array.view(f"<u{array.itemsize}")


# --- where two tensors differ, and writing there ---


@given(tensors.flatmap(lambda bits: st.tuples(st.just(bits), some.edited(bits))), passes)
def test_the_changed_positions_are_those_of_numpy_for_arbitrary_bits(pair, size):
    old, new = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_CHUNK", size)
        found = ops.changed(bits_tensor(old), bits_tensor(new))
    assert found.dtype == torch.int64
    assert found.tolist() == np.flatnonzero(old.flat != new.flat).tolist()


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("code", ["F8_E4M3", "BF16", "F32", "I64", "F4"])
def test_the_changed_positions_are_those_of_the_kernel(code, share):
    old = random_bits(code, 3000)
    new = old.copy()
    new.flat[some_positions(3000, share)] ^= 1
    found = ops.changed(bits_tensor(old), bits_tensor(new))
    assert np.array_equal(as_units(found), changes.changed_positions(old.flat, new.flat))


def test_nan_equals_itself_and_the_zeros_differ():
    old = torch.tensor([float("nan"), 0.0, -0.0, 1.0], dtype=torch.bfloat16)
    assert ops.changed(old, old.clone()).tolist() == []
    assert ops.changed(old, torch.tensor([float("nan"), -0.0, 0.0, 1.0], dtype=torch.bfloat16)).tolist() == [1, 2]


def test_strided_and_conjugated_tensors_are_read_in_row_major_order():
    square = torch.arange(12, dtype=torch.int16).view(3, 4)
    assert ops.units_of(square.t()).tolist() == square.t().flatten().tolist()
    numbers = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert ops.changed(numbers.conj(), torch.tensor([1 - 2j, 3 + 5j], dtype=torch.complex64)).tolist() == [1]


@given(tensors, st.data())
def test_scatter_writes_exactly_the_units_named_and_hands_back_the_old_ones(bits, data):
    places = sorted(data.draw(st.sets(st.integers(0, bits.flat.size - 1)))) if bits.flat.size else []
    tensor, new = bits_tensor(bits), data.draw(some.edited(bits)).flat[::-1][places].copy()
    positions, values = torch.tensor(places, dtype=torch.int64), host_integers(new, new.itemsize)
    expected = bits.flat.copy()
    changes.scatter(expected, np.array(places, np.uint64), new)
    old = ops.scatter_(tensor, positions, values)
    assert np.array_equal(as_units(old), bits.flat[places])
    assert np.array_equal(as_units(ops.units_of(tensor)), expected)
    assert torch.equal(ops.gather(tensor, positions), values)
    ops.scatter_(tensor, positions, old)
    assert ops.changed(tensor, bits_tensor(bits)).numel() == 0


def test_parameters_are_written_in_place_with_values_of_their_own_dtype():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    place = parameter.data_ptr()
    ops.scatter_(parameter, torch.tensor([1, 5]), torch.tensor([1.5, -0.0]))
    assert parameter.tolist() == [[0, 1.5, 0], [0, 0, 0]]
    assert ops.gather(parameter, torch.tensor([5])).tolist() == [-(1 << 31)]
    assert parameter.data_ptr() == place


def test_what_does_not_fit_is_refused_before_anything_is_written():
    tensor, at = torch.zeros(4, 2), torch.tensor([1])
    for target, positions, values in [
        (tensor.t(), at, torch.ones(1)),
        (tensor, at, torch.ones(1, dtype=torch.float16)),
        (tensor, torch.tensor([1, 2]), torch.ones(1)),
        (tensor, at.int(), torch.ones(1)),
    ]:
        with pytest.raises(WeightsMismatch):
            ops.scatter_(target, positions, values)
    assert not tensor.any()
    with pytest.raises(WeightsMismatch, match=r"float32\[4, 2\] and torch.int32\[4, 2\]"):
        ops.changed(tensor, tensor.int())
    with pytest.raises(WeightsMismatch):
        ops.changed(tensor, tensor[:1])


# --- ranks within the classes of a base ---


def mask_of(code):
    dtype = dtype_of(code)
    return dtype.unsigned.type((1 << (8 * dtype.width - dtype.is_float)) - 1)


def pieces_of(bits, borders):
    """Each piece of a one-dimensional tensor: where it starts, its units, and the torch tensor."""
    whole = bits_tensor(bits)
    for start, stop in pairwise(borders):
        yield start, bits.flat[start:stop], whole[start:stop]


def rank_both_ways(bits, positions, cuts, borders):
    """(classes, ranks) of the changes of a block, by the kernel and by torch, piece by piece."""
    limits, seen, counted = np.array(cuts, bits.flat.dtype), np.zeros(len(cuts) + 1, np.int64), None
    expected, found = [], []
    for start, flat, tensor in pieces_of(bits, borders):
        inside = positions[(positions >= start) & (positions < start + flat.size)] - start
        kernel = np.zeros(inside.size, np.uint8), np.zeros(inside.size, np.uint32)
        classes.rank(flat, inside.astype(np.uint64), limits, mask_of(bits.dtype), seen, *kernel)
        expected.append(kernel)
        ranked = ops.rank(tensor, torch.from_numpy(inside), cuts, counted)
        found.append((ranked.classes.numpy(), ranked.ranks.numpy()))
        counted = ranked.seen
        assert counted.tolist() == seen.tolist()
    return tuple(tuple(map(np.concatenate, zip(*pairs, strict=True))) for pairs in (expected, found))


def select_both_ways(bits, cuts, numbers, ranks, borders):
    """(positions, which) of the changes of a block, by the kernel and by torch, piece by piece; sorted by class and rank before."""
    limits, seen, counted = np.array(cuts, bits.flat.dtype), np.zeros(len(cuts) + 1, np.int64), None
    stops = np.searchsorted(numbers, np.arange(len(cuts) + 1), side="right").astype(np.int64)
    nexts = np.concatenate([[0], stops[:-1]])
    expected, found = [], []
    for start, flat, tensor in pieces_of(bits, borders):
        positions, which = np.zeros(ranks.size, np.uint64), np.zeros(ranks.size, np.int64)
        total = classes.select(flat, limits, mask_of(bits.dtype), seen, ranks.astype(np.uint32), nexts, stops, positions, which)
        expected.append((positions[:total].astype(np.int64) + start, which[:total]))
        selected = ops.select(tensor, cuts, torch.from_numpy(numbers), torch.from_numpy(ranks), counted)
        found.append((selected.positions.numpy() + start, selected.which.numpy()))
        counted = selected.seen
    return tuple(tuple(map(np.concatenate, zip(*pairs, strict=True))) for pairs in (expected, found))


def same(expected, found):
    return all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("borders", [[0, 2000], [0, 0, 1, 511, 513, 1500, 2000]])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 1.0])
@pytest.mark.parametrize("code", ["F8_E5M2", "U8", "BF16", "U16", "F32", "I32", "F64", "U64"])
def test_ranks_and_their_inverse_are_those_of_the_kernels_in_one_piece_or_many(code, share, borders):
    bits, positions, cuts = random_bits(code, 2000), some_positions(2000, share), CUTS[dtype_of(code).width]
    expected, found = rank_both_ways(bits, positions, cuts, borders)
    assert same(expected, found)
    order = np.lexsort((found[1], found[0]))
    expected, selected = select_both_ways(bits, cuts, found[0][order], found[1][order], borders)
    assert same(expected, selected)
    assert np.array_equal(selected[0], positions)
    assert np.array_equal(order[selected[1]], np.arange(positions.size))


@given(tensors.filter(lambda bits: bits.dtype != "F4"), st.data())
def test_a_rank_is_how_many_units_of_its_class_come_before(bits, data):
    size, top = bits.flat.size, (1 << 8 * bits.flat.itemsize) - 1
    cuts = sorted(data.draw(st.sets(st.integers(1, top) | st.sampled_from([int(u) or 1 for u in bits.flat] or [1]), max_size=4)))
    places = sorted(data.draw(st.sets(st.integers(0, size - 1)))) if size else []
    of_all = [sum(cut <= (u & int(mask_of(bits.dtype))) for cut in cuts) for u in bits.flat.tolist()]
    base, positions = bits_tensor(bits), torch.tensor(places, dtype=torch.int64)
    found = ops.rank(base, positions, cuts)
    assert found.classes.tolist() == [of_all[place] for place in places]
    assert found.ranks.tolist() == [of_all[:place].count(of_all[place]) for place in places]
    assert found.seen.tolist() == [of_all.count(c) for c in range(len(cuts) + 1)]
    selected = ops.select(base, cuts, found.classes.flip(0), found.ranks.flip(0))
    assert selected.positions.tolist() == places
    assert selected.which.tolist() == list(range(len(places)))[::-1]


def test_without_cuts_there_is_one_class_and_a_rank_is_a_position():
    base, positions = torch.arange(-5, 5), torch.tensor([0, 3, 9])
    found = ops.rank(base, positions, [], seen=torch.tensor([100]))
    assert (found.classes.tolist(), found.ranks.tolist(), found.seen.tolist()) == ([0, 0, 0], [100, 103, 109], [110])


def test_ranks_that_the_base_does_not_have_are_not_found():
    base = torch.tensor([0.0, 1.0, 0.0])
    found = ops.select(base, [1], torch.tensor([0, 0, 1], dtype=torch.uint8), torch.tensor([1, 2, 1]))
    assert (found.positions.tolist(), found.which.tolist(), found.seen.tolist()) == ([2], [0], [2, 1])


# --- the state digest's sums ---


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (torch.zeros(0), "00000000000000000000000000000000"),
        (torch.zeros(1), "45388e6eb6e2be4d2e5cbca75d009245"),
        (torch.tensor([0x3F80, 0x8000, 0x7FC1], dtype=torch.uint16), "ead8d8d62e67a3740b319210b28c6593"),
        (torch.tensor([-1]), "720b09a32756e64d3d4947ecf113dfb7"),
    ],
)
def test_the_published_sums_hold(units, expected):
    assert ops.flat_sum(units).hex == expected


@given(tensors, passes)
def test_the_sum_of_a_whole_tensor_is_that_of_numpy_for_arbitrary_bits(bits, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_CHUNK", size)
        assert ops.flat_sum(bits_tensor(bits)) == digest.plain_flat_sum(bits.flat)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("code", ["U8", "BF16", "F32", "F64"])
def test_the_sums_are_those_of_the_kernels_at_any_positions(code):
    bits, positions = random_bits(code, 3000), random_bits("U64", 3000, seed=1).flat
    assert ops.flat_sum(bits_tensor(bits)) == digest.Sum(*map(int, digests.sum_flat(bits.flat)))
    found = ops.sum_at(torch.from_numpy(positions.view(np.int64)), bits_tensor(bits))
    assert found == digest.Sum(*map(int, digests.sum_at(positions, bits.flat)))


@given(tensors.flatmap(lambda bits: st.tuples(st.just(bits), some.edited(bits))))
def test_the_sum_follows_an_update_by_what_it_overwrote_and_wrote(pair):
    tensor, new = map(bits_tensor, pair)
    positions = ops.changed(tensor, new)
    values = ops.gather(new, positions)
    before = ops.flat_sum(tensor)
    old = ops.scatter_(tensor, positions, values)
    assert before - ops.sum_at(positions, old) + ops.sum_at(positions, values) == ops.flat_sum(new) == ops.flat_sum(tensor)


# --- steps ---


@pytest.mark.parametrize("code", [code for code in CODES if dtype_of(code).width == 1])
def test_steps_are_those_of_numpy_between_all_pairs_of_8_bits(code):
    dtype, every = dtype_of(code), np.arange(256, dtype=np.uint8)
    old, new = np.repeat(every, 256), np.tile(every, 256)
    steps = ops.steps_between(torch.from_numpy(old), torch.from_numpy(new), dtype)
    assert np.array_equal(as_units(steps), plain.steps_between(old, new, dtype))
    assert np.array_equal(as_units(ops.advance(torch.from_numpy(old), steps, dtype)), new)


@pytest.mark.parametrize("code", ["BF16", "F16", "I16", "U16"])
def test_steps_are_those_of_numpy_from_a_spread_of_16_bit_patterns_to_all(code):
    dtype, new = dtype_of(code), np.arange(1 << 16, dtype=np.uint16)
    for base in (0, 1, 0x3F80, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xBF80, 0xFFFF):
        old = np.full_like(new, base)
        before, after = host_integers(old, 2), host_integers(new, 2)
        steps = ops.steps_between(before, after, dtype)
        assert np.array_equal(as_units(steps), plain.steps_between(old, new, dtype))
        assert torch.equal(ops.advance(before, steps, dtype), after)


@given(tensors.flatmap(lambda bits: st.tuples(st.just(bits), some.tensors(bits.spec))))
def test_steps_are_those_of_numpy_for_arbitrary_bits_and_lead_back(pair):
    dtype = dtype_of(pair[0].dtype)
    old, new = (ops.units_of(bits_tensor(bits)) for bits in pair)
    steps = ops.steps_between(old, new, dtype)
    assert np.array_equal(as_units(steps), plain.steps_between(pair[0].flat, pair[1].flat, dtype))
    assert torch.equal(ops.advance(old, steps, dtype), new)
    assert torch.equal(ops.from_key(ops.to_key(old, dtype), dtype), old)
