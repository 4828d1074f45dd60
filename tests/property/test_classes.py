"""Ranks within classes, and back: the compiled kernels give what counting gives, and the classes chosen are the cheapest."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse import coder, kernels
from pulse.bits import DTYPES, Spec, TensorBits, dtype_of
from pulse.codec import ranks
from pulse.codec.classes import Classes, choose, entropy, exponent, exponents_of, mask_of
from pulse.codec.contextual import classes_of, decode_block, encode_block, units_of
from pulse.codec.lanes import lanes_of
from pulse.errors import FormatError
from pulse.patch import Part
from pulse.testing import strategies as some

WIDTHS = [1, 2, 4, 8]
SIZES = [0, 1, 511, 512, 513, 1024, 1025, 3000]


def naive(pieces, positions, cuts, mask):
    """(class, rank) of each position in all pieces end to end, by counting; and how many units each class has."""
    flat = np.concatenate(pieces)
    classes = np.searchsorted(cuts, flat & mask, side="right")
    ranks = np.zeros(flat.size, np.int64)
    for c in range(cuts.size + 1):
        ranks[classes == c] = np.arange(np.count_nonzero(classes == c))
    at = positions.astype(np.int64)
    return classes[at], ranks[at], np.bincount(classes, minlength=cuts.size + 1)


def kinds_of_memory(pieces):
    """The same units, writeable or at odd addresses by turns."""
    for i, piece in enumerate(pieces):
        room = np.zeros(piece.nbytes + 1, np.uint8)
        room[i % 2 :][: piece.nbytes] = piece.view(np.uint8)
        twin = np.frombuffer(room.data, piece.dtype, piece.size, i % 2)
        twin.flags.writeable = i % 3 == 0
        yield twin


def proven(pieces, positions, cuts, mask):
    """Kernels and plain functions against counting, from piece to piece, there and back."""
    by_kernels(pieces, positions, cuts, mask)
    plainly(pieces, positions, cuts, mask)


def plainly(pieces, positions, cuts, mask):
    """`plain_rank` and `plain_select`, through the same pieces."""
    classes, found, counts = naive(pieces, positions, cuts, mask)
    borders = np.cumsum([0, *(piece.size for piece in pieces)])
    order = np.argsort(classes, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(classes, minlength=counts.size))])
    seen, again, nexts = np.zeros(counts.size, np.int64), np.zeros(counts.size, np.int64), starts[:-1].copy()
    for piece, start in zip(pieces, borders, strict=False):
        lo, hi = np.searchsorted(positions, [start, start + piece.size])
        inside = positions[lo:hi] - np.uint64(start)
        got = ranks.plain_rank(piece, inside, cuts, mask, seen)
        assert np.array_equal(got[0], classes[lo:hi])
        assert np.array_equal(got[1], found[lo:hi])
        back, which = ranks.plain_select(piece, cuts, mask, again, found[order].astype(np.uint32), nexts, starts[1:])
        assert np.array_equal(back, inside)
        assert np.array_equal(order[which], np.arange(lo, hi))
    assert np.array_equal(seen, counts)
    assert np.array_equal(again, counts)
    assert np.array_equal(nexts, starts[1:])


def by_kernels(pieces, positions, cuts, mask):
    """The compiled kernels."""
    classes, expected, counts = naive(pieces, positions, cuts, mask)
    borders = np.cumsum([0, *(piece.size for piece in pieces)])
    seen, got, found = np.zeros(counts.size, np.int64), np.zeros(positions.size, np.uint8), np.zeros(positions.size, np.uint32)
    for piece, start in zip(pieces, borders, strict=False):
        lo, hi = np.searchsorted(positions, [start, start + piece.size])
        kernels.rank(piece, positions[lo:hi] - np.uint64(start), cuts, mask, seen, got[lo:hi], found[lo:hi])
    assert np.array_equal(got, classes)
    assert np.array_equal(found, expected)
    assert np.array_equal(seen, counts)
    order = np.argsort(classes, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(classes, minlength=counts.size))])
    seen, nexts = np.zeros(counts.size, np.int64), starts[:-1].copy()
    back, which = np.zeros(positions.size, np.uint64), np.zeros(positions.size, np.int64)
    done = 0
    for piece, start in zip(pieces, borders, strict=False):
        new = done + kernels.select(piece, cuts, mask, seen, found[order], nexts, starts[1:], back[done:], which[done:])
        back[done:new] += np.uint64(start)
        done = new
    assert done == positions.size
    assert np.array_equal(back, positions)
    assert np.array_equal(order[which], np.arange(positions.size))
    assert np.array_equal(seen, counts)
    assert np.array_equal(nexts, starts[1:])


def drawn(rng, width, size, kinds):
    """Units of a piece: few values, or any."""
    dtype = np.dtype(f"<u{width}")
    units = rng.integers(0, 256, width * size, np.uint8).view(dtype)
    return fixed(units if kinds is None else (units % dtype.type(kinds)).astype(dtype))


def fixed(units):
    """Read only, as the codec hands units to kernels: they are compiled for each kind of memory."""
    units.flags.writeable = False
    return units


def some_cuts(rng, width, most):
    """Up to 15 borders of classes, low and high."""
    top = (1 << (8 * width - 1)) - 1
    drawn = {int(n) for n in rng.integers(1, min(top, 8), most // 2)} | {int(n) for n in rng.integers(1, top, most - most // 2)}
    return np.array(sorted(drawn | ({top} if most > 10 else set()))[:15], f"<u{width}"), np.dtype(f"<u{width}").type(top)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
def test_ranks_equal_counting_and_selecting_them_leads_back(width, size):
    rng = np.random.default_rng([width, size])
    for share in (0.0, 0.002, 0.03, 0.06, 0.5, 1.0):  # 24 changes in a stride of 512 are the border of two ways: a share of 0.047
        for kinds in (7, None):
            pieces = [drawn(rng, width, n, kinds) for n in (size, int(rng.integers(0, 700)), 0, 513)]
            positions = np.flatnonzero(rng.random(sum(piece.size for piece in pieces)) < share).astype(np.uint64)
            proven(pieces, positions, *some_cuts(rng, width, int(rng.integers(0, 16))))


def test_memory_that_is_writeable_or_unaligned_ranks_as_well():
    rng = np.random.default_rng(0)
    pieces = [drawn(rng, 2, 1100, None) for _ in range(4)]
    positions = np.flatnonzero(rng.random(4400) < 0.04).astype(np.uint64)
    proven(list(kinds_of_memory(pieces)), positions, *some_cuts(rng, 2, 9))


@pytest.mark.parametrize("changes", [0, 1, 23, 24, 25, 26, 64, 511, 512])
def test_a_stride_with_any_number_of_changes_ranks_right_at_its_borders(changes):
    rng = np.random.default_rng(changes)
    flat = drawn(rng, 2, 512 * 3 + 65, 900)
    inside = np.sort(rng.permutation(512)[:changes]) + 512
    edges = [0, 511, 1024, 1535, 1536, flat.size - 1]
    positions = np.unique(np.concatenate([inside, edges])).astype(np.uint64)
    proven([flat], positions, *some_cuts(rng, 2, 12))


@given(st.data(), st.sampled_from(WIDTHS))
def test_ranks_of_arbitrary_units_classes_and_positions_lead_back(data, width):
    top = (1 << 8 * width) - 1
    units = st.integers(0, 9) | st.integers(0, top)
    pieces = [fixed(np.array(piece, f"<u{width}")) for piece in data.draw(st.lists(st.lists(units, max_size=30), min_size=1, max_size=3))]
    total = sum(piece.size for piece in pieces)
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1)))) if total else [], np.uint64)
    mask = np.dtype(f"<u{width}").type(data.draw(st.sampled_from([top, top >> 1])))
    cuts = np.array(sorted(data.draw(st.sets(st.integers(1, int(mask)), max_size=15))), f"<u{width}")
    proven(pieces, positions, cuts, mask)


def test_ranks_that_no_unit_has_are_not_found_and_nothing_else_is_harmed():
    flat = fixed(np.array([1, 2, 1, 1, 9], "<u2"))
    cuts, mask = np.array([2], "<u2"), np.uint16(0x7FFF)
    starts = np.array([0, 2, 4])
    seen, nexts, positions, which = np.zeros(2, np.int64), starts[:-1].copy(), np.full(4, 77, np.uint64), np.full(4, -1)
    wanted = np.array([1, 3, 0, 9], np.uint32)
    found = kernels.select(flat, cuts, mask, seen, wanted, nexts, starts[1:], positions, which)
    assert (found, positions.tolist(), which.tolist(), nexts.tolist()) == (2, [1, 2, 77, 77], [2, 0, -1, -1], [1, 3])
    again = starts[:-1].copy()
    plain = ranks.plain_select(flat, cuts, mask, np.zeros(2, np.int64), wanted, again, starts[1:])
    assert (plain[0].tolist(), plain[1].tolist(), again.tolist()) == ([1, 2], [2, 0], [1, 3])


@pytest.mark.parametrize("changes", [0, 1, ranks._FAST_CHANGES - 1, ranks._FAST_CHANGES, ranks._FAST_CHANGES + 1])
def test_blocks_of_either_size_are_coded_alike(changes):
    rng = np.random.default_rng(changes)
    at = np.sort(rng.permutation(20 * changes)[:changes]).astype(np.uint32)
    folded = rng.integers(1, 1 << 16, changes).astype(np.uint64)
    starts, means = np.array([0, changes // 3, changes]), [5000, 300]
    at[: changes // 3] = np.arange(changes // 3)
    section = ranks.encode(at, folded, starts, means, 77)
    assert section == coder.encode(at.tolist(), folded.tolist(), starts.tolist(), means, 77)
    found = ranks.decode(section, means, changes, 20 * changes, (1 << 16) - 1)
    assert [part.tolist() for part in found[:3]] == [at.tolist(), folded.tolist(), starts.tolist()]
    assert found[3] == 77
    with pytest.raises(FormatError):
        ranks.decode(section + b"x", means, changes, 20 * changes, (1 << 16) - 1)


def test_an_encoder_that_runs_out_of_room_gets_more():
    changes = ranks._FAST_CHANGES
    at, folded = np.arange(changes, dtype=np.uint32) * np.uint32(70000), np.full(changes, (1 << 64) - 1, np.uint64)
    section = ranks.encode(at, folded, np.array([0, changes]), [1], 5)
    assert len(section) > 4 * (2 * changes + 256)  # what it is given at first
    assert section == coder.encode(at.tolist(), folded.tolist(), [0, changes], [1], 5)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**4)), min_size=1, max_size=7), st.integers(1, 5))
def test_the_classes_chosen_cost_no_more_than_any_other_way_to_divide_the_exponents(rows, blocks):
    units, changed = np.array([float(n) for n, _ in rows]), np.array([k for _, k in rows])
    chosen = choose(units, changed, blocks)
    present = [i for i in range(len(rows)) if rows[i] != (0, 0)]
    if not present:
        assert chosen == Classes((), (256,))
        return
    size = np.maximum(units, changed)

    def cost(borders):
        groups = np.split(present, [present.index(b) for b in borders])
        return sum(float(entropy(size[g].sum()[None], changed[g].sum()[None].astype(float))[0]) + 100 + 60 * blocks for g in groups)

    best = min(cost(borders) for count in range(len(present)) for borders in combinations(present[1:], count))
    assert cost(chosen.exponents) <= best * (1 + 1e-9) + 1e-6


@settings(max_examples=20)
@given(st.sampled_from(list(DTYPES.values())), st.integers(0, 2**32), st.integers(1, 1000))
def test_chosen_classes_are_always_classes_of_their_dtype(dtype, seed, blocks):
    rng = np.random.default_rng(seed)
    size = exponents_of(dtype)
    units = rng.choice([0.0, 1.0, 1e3, 1e9, 1e18], size)
    changed = (np.minimum(units, 1e9) * rng.random(size) ** 20).astype(np.int64) + rng.integers(0, 2, size)
    classes = choose(units, changed, blocks)
    classes.check(exponents_of(dtype))
    cuts = classes.cuts(dtype)
    patterns = rng.integers(0, 256, 8 * 64, np.uint8).view(dtype.unsigned)
    by_cuts = np.searchsorted(cuts, patterns & mask_of(dtype), side="right")
    by_exponents = np.searchsorted(classes.exponents, exponent(patterns, dtype), side="right")
    assert np.array_equal(by_cuts, by_exponents)


@pytest.mark.parametrize(
    "classes",
    [
        Classes((), ()), Classes((5,), (1,)), Classes((), (1, 1)), Classes((5, 5), (1, 1, 1)), Classes((6, 5), (1, 1, 1)), Classes((0,), (1, 1)),
        Classes((256,), (1, 1)), Classes((1 << 60,), (1, 1)), Classes((), (0,)), Classes((), (1 << 40,)), Classes((), (1 << 62,)),
        Classes(tuple(range(1, 17)), (1,) * 17),
    ],
)  # fmt: skip
def test_what_are_no_classes_is_refused(classes):
    with pytest.raises(FormatError, match="no classes|do not divide|mean gap"):
        classes.check(exponents_of(dtype_of("BF16")))


def test_integers_have_one_class_and_all_16_classes_may_be_used():
    with pytest.raises(FormatError, match="do not divide"):
        Classes((1,), (1, 1)).check(exponents_of(dtype_of("I32")))
    Classes((), (1,)).check(exponents_of(dtype_of("I32")))
    Classes(tuple(range(1, 16)), ((1 << 40) - 1,) * 16).check(exponents_of(dtype_of("F8_E4M3")))


@given(st.data(), some.tensors())
def test_any_stretch_of_any_part_is_read_in_the_order_of_its_positions(data, bits):
    for part in data.draw(some.parts("w", bits.spec)):
        expected = bits.flat[part.locate(np.arange(part.units, dtype=np.uint64)).astype(np.int64)]
        lo = data.draw(st.integers(0, part.units))
        hi = data.draw(st.integers(lo, part.units))
        found = units_of(part, lambda name: bits, lo, hi)
        assert np.array_equal(found, expected[lo:hi])


def test_a_base_that_is_cut_out_of_other_memory_or_that_may_be_written_is_read_alike_and_left_alone():
    rows = np.arange(64, dtype="<u2").reshape(8, 8)
    column, spec = rows[:, 3], Spec("BF16", (8,))
    positions, steps = np.array([1, 5], np.uint64), np.array([1, 65535], "<u2")
    (lane,) = lanes_of([Part("w", spec)])
    blocks = []
    for flat in (column, column.copy(), fixed(column.copy())):
        could = flat.flags.writeable
        blocks.append(
            encode_block(lane, (0, 8), positions, steps, Classes((1,), (256, 256)), lambda name, flat=flat: TensorBits("BF16", (8,), flat))
        )
        assert flat.flags.writeable == could
    assert blocks[0] == blocks[1] == blocks[2]


@given(st.data(), st.sampled_from(list(DTYPES.values())))
def test_a_block_of_any_classes_comes_back_from_the_entropy_coder(data, dtype):
    size = 60 * (8 if dtype.bits % 8 else 1)
    spec = Spec(dtype.name, (size,))
    flat = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, spec.nbytes, np.uint8).view(dtype.unsigned)
    limits = st.sets(st.integers(1, max(exponents_of(dtype) - 1, 1)), max_size=15 if dtype.is_float else 0).map(sorted)
    exponents = tuple(data.draw(limits)) if exponents_of(dtype) > 1 else ()
    classes = Classes(exponents, tuple(data.draw(st.integers(1, 1 << 39)) for _ in range(len(exponents) + 1)))
    classes.check(exponents_of(dtype))
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, spec.units - 1)))), np.uint64)
    steps = np.array([data.draw(st.integers(1, (1 << 8 * dtype.width) - 1)) for _ in positions], dtype.unsigned)
    (lane,) = lanes_of([Part("w", spec)])
    block = lane, (0, spec.units)

    def base(name):
        return TensorBits(spec.dtype, spec.shape, flat)

    entry, sections = encode_block(*block, positions, steps, classes, base)
    found, bits = decode_block(*block, entry, sections, classes, base)
    assert np.array_equal(found, positions)
    assert np.count_nonzero(bits != flat[positions.astype(np.int64)]) == positions.size
    again, more = encode_block(*block, positions, steps, classes_of(lane, positions, base, 1), base)
    assert np.array_equal(decode_block(*block, again, more, classes_of(lane, positions, base, 1), base)[1], bits)
